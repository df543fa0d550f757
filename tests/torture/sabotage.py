"""Bugs to plant in real daemons, by name: each a patch of the running program, and each the breach of one promise."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from torture import filebugs


def plant(name: str) -> None:
    """Plant a bug in this process and its forks; '' plants none."""
    if name:
        BUGS[name]()


def publish_before_commit() -> None:
    """An entry goes to the journal's file before the transaction that holds it is committed."""
    from autotuner.edge.journal import Journal
    from autotuner.edge.store import Store
    from autotuner.errors import AutotunerError

    journals: list[Journal] = []
    made, add_entry = Journal.__init__, Store.add_entry

    def making(self: Journal, *given: Any) -> None:
        made(self, *given)
        journals.append(self)

    def adding(self: Store, *words: Any, **named: Any) -> Any:
        entry = add_entry(self, *words, **named)
        for journal in [journal for journal in journals if journal._slot == entry.slot]:
            try:
                journal.append(entry)
            except AutotunerError:
                continue  # it is not open yet: the loop publishes the entry later
        return entry

    Journal.__init__ = making  # type: ignore[method-assign]
    Store.add_entry = adding  # type: ignore[method-assign]


def inheritable_lock() -> None:
    """What the daemon starts inherits the descriptor of its lock, and so holds the state folder when the daemon is gone."""
    from autotuner.edge.files import FolderLock

    acquire, start = FolderLock.acquire, asyncio.create_subprocess_exec

    def acquiring(self: FolderLock) -> None:
        acquire(self)
        os.set_inheritable(self._fd, True)

    async def starting(*argv: Any, **named: Any) -> asyncio.subprocess.Process:
        return await start(*argv, **{**named, "close_fds": False})

    FolderLock.acquire = acquiring  # type: ignore[method-assign]
    asyncio.create_subprocess_exec = starting


def no_benchmark_client() -> None:
    """No bug but bad luck: the benchmark's worker cannot be run."""
    from autotuner.bench import worker

    worker.command = lambda: ("/nonexistent/benchmark-worker",)


NO_CLIENT = "no benchmark client"
BUGS: dict[str, Callable[[], None]] = {
    "publish before commit": publish_before_commit,
    "retry fsync": filebugs.retry_fsync,
    "inheritable lock fd": inheritable_lock,
    NO_CLIENT: no_benchmark_client,
}


def in_daemons(name: str) -> Callable[[], None]:
    """Given a bug's name, return what plants it in every daemon that this process will have started."""
    return lambda: os.environ.update(TORTURE_BUG=name)
