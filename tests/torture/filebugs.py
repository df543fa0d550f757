"""Bugs to plant in the code that keeps files, verifies them and writes command lines."""

from collections.abc import Mapping
from pathlib import Path

from autotuner.core import seal, shell
from autotuner.core.entry import Flaw
from autotuner.edge import files
from autotuner.edge.journal import Journal


def drop_folder_fsync() -> None:
    """A new file's name, or a renamed one's, is not made durable."""
    files.sync_folder = lambda path: None


def drop_tail_truncation() -> None:
    """A torn tail is kept aside, and stays in the journal as well."""

    def keep(self: Journal, path: Path, data: bytes, good: int, label: str) -> Path:
        torn = path.with_name(f"{path.name}.torn-{label}")
        files.write_atomically(torn, data[good:])
        return torn

    Journal._cut = keep  # type: ignore[method-assign]


def retry_fsync() -> None:
    """A failed fsync is tried again; the second one says that all is well."""

    def append(path: Path, data: bytes, header: bytes = b"", mode: int = 0o644) -> None:
        system = files.os
        fd = system.open(path, system.O_WRONLY | system.O_APPEND | system.O_CREAT | system.O_CLOEXEC, mode)
        try:
            new = system.fstat(fd).st_size == 0
            files.write_all(fd, header + data if new else data)
            try:
                system.fsync(fd)
            except OSError:
                system.fsync(fd)
            if new:
                files.sync_folder(path.parent)
        finally:
            system.close(fd)

    files.append = append


def f_string_command() -> None:
    """A command line is put together as people do it who have not been bitten yet."""

    def command_line(argv: tuple[str, ...], env: dict[str, str] | None = None) -> str:
        return " ".join([*(f"{name}={value}" for name, value in (env or {}).items()), *argv])

    shell.command_line = command_line


def accept_newer_keys() -> None:
    """The verifier takes a seal for good whatever key it was made with."""
    real = seal._wrong

    def wrong(one: seal.Seal, due: int, key: bytes, entries: Mapping[int, str]) -> Flaw | None:
        found = real(one, due, key, entries)
        return None if found is not None and "another key" in found.message else found

    seal._wrong = wrong
