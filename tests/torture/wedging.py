"""A daemon that stops at one chosen await. A program: wedging.py SETTINGS MODULE:LINE:COLUMN HOW REPORT BUG

The modules of the loop are compiled from their sources with every `await X` made `await wedge(place, X)`; the chosen one never goes on:

  waits     the await never ends, until it is cancelled
  deaf      the await never ends, and swallows its cancellation
  blocks    the whole loop is blocked in a call
  map       nothing hangs; REPORT gets a line for each await that is come to, with the seconds since the start

In REPORT it writes, once it hangs, whether that was in the task that runs the cycles; and BUG is one of planted.BUGS, or empty. An
operator in the same process asks for what only people ask for, so that as many awaits as can be are come to.
"""

import ast
import asyncio
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import autotuner

MODULES = ("daemon", "rounds", "slotworker", "act", "freeing", "resolve", "measure")
DEADLINE_S = 1.0  # of a cycle, instead of 30
PATIENCE_S = 0.1  # of a round with a cycle that is late, instead of 1
BLOCKED_S = 60.0


def awaits() -> dict[str, str]:
    """Every await of the loop's modules, as MODULE:LINE:COLUMN, with the function that it is in."""
    found = {}
    for name in MODULES:
        tree = ast.parse(source(name).read_text(encoding="utf-8"))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Await):
                    found[f"{name}:{node.lineno}:{node.col_offset}"] = function.name
    return found


def source(name: str) -> Path:
    """The file of one of the modules."""
    return Path(autotuner.__file__).with_name(f"{name}.py")


class _Wrap(ast.NodeTransformer):
    """Makes every await ask us first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_Await(self, node: ast.Await) -> ast.Await:
        self.generic_visit(node)
        place = ast.Constant(f"{self._name}:{node.lineno}:{node.col_offset}")
        call = ast.Call(ast.Name("__wedge__", ast.Load()), [place, node.value], [])
        return ast.fix_missing_locations(ast.copy_location(ast.Await(ast.copy_location(call, node)), node))


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        tree = _Wrap(self.name.rpartition(".")[2]).visit(ast.parse(data))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def path_stats(self, path: Any) -> Any:
        raise OSError("no cached code")

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__wedge__"] = wedge
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        package, _, name = fullname.rpartition(".")
        if package != "autotuner" or name not in MODULES:
            return None
        return importlib.util.spec_from_loader(fullname, _Loader(fullname, str(source(name))))


class Wedge:
    """Where to hang, how, and where to write that it hangs; `cycles` runs them, each slot's in a task called `cycle_of` it."""

    place = how = ""
    report = Path()
    cycles: asyncio.Task[Any] | None = None
    cycle_of = ""
    began_s = 0.0
    come_to: ClassVar[set[str]] = set()


async def wedge(place: str, awaitable: Any) -> Any:
    """Go on as usual, but at the chosen place."""
    if Wedge.how == "map" and place not in Wedge.come_to:
        Wedge.come_to.add(place)
        with Wedge.report.open("a") as f:
            f.write(f"{place} {time.monotonic() - Wedge.began_s:.2f}\n")
    if place != Wedge.place:
        return await awaitable
    if not Wedge.report.exists():
        task = asyncio.current_task()
        in_cycles = task is Wedge.cycles or (task is not None and task.get_name().startswith(Wedge.cycle_of))
        Wedge.report.with_suffix(".new").write_text(json.dumps({"in_cycles": in_cycles}))
        Wedge.report.with_suffix(".new").rename(Wedge.report)
    if Wedge.how == "blocks":
        time.sleep(BLOCKED_S)
    while True:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            if Wedge.how != "deaf":
                raise


async def operate(store: Any, slot: str, report: Path) -> None:
    """What people do: once the queue is worked off they reload, stop, restore; and at last the server falls silent."""
    late = report.with_name("late")  # while it is there, the driver keeps the memory of what has ended

    async def come(what: Callable[[], object]) -> None:
        while not what():
            await asyncio.sleep(0.05)

    def serves() -> bool:
        return any(launch.state == "serving" for launch in store.open_launches(slot))

    await come(lambda: store.ladder(slot) and not store.queue(slot) and not store.trial_in_hand(slot))
    os.kill(os.getpid(), signal.SIGHUP)
    await come(serves)
    late.touch()
    store.update_slot(slot, stopped="by the operator")
    await come(lambda: any(launch.end_asked for launch in store.open_launches(slot)))
    await asyncio.sleep(1.0)
    late.unlink()
    await come(lambda: not store.open_launches(slot))
    store.forgive_failures(slot)
    store.update_slot(slot, stopped="", restore_wanted="by the operator")
    await come(lambda: serves() and not store.slot(slot).restore_wanted)
    from autotuner.edge import procfs

    for pid in procfs.of_launch(store.open_launches(slot)[0].id):
        if (
            "fake_openai" in Path(f"/proc/{pid}/cmdline").read_text()
            and "shim" not in Path(f"/proc/{pid}/cmdline").read_text()
        ):
            os.kill(pid, signal.SIGSTOP)
    await come(lambda: not serves())
    report.with_name("worked").touch()


def main(settings: str, place: str, how: str, report: str, bug: str) -> None:
    """Run the daemon as its command does."""
    Wedge.place, Wedge.how, Wedge.report = place, how, Path(report)
    sys.meta_path.insert(0, _Finder())
    from autotuner import daemon, log, rounds
    from torture.planted import BUGS

    if how != "map":
        daemon.CYCLE_DEADLINE_S = daemon.END_DEADLINE_S = DEADLINE_S
    rounds.PATIENCE_S, Wedge.cycle_of = PATIENCE_S, rounds.CYCLE_OF
    for known in BUGS:
        if known.name == bug:
            known.plant()
    log.configure(as_json=True)

    async def work() -> None:
        Wedge.cycles, Wedge.began_s = asyncio.current_task(), time.monotonic()
        worked = daemon.Daemon(Path(settings))
        operator = asyncio.create_task(operate(worked._store, next(iter(worked._settings.slots)), Path(report)))
        try:
            await worked.run()
        finally:
            operator.cancel()

    asyncio.run(work())


if __name__ == "__main__":
    main(*sys.argv[1:])
