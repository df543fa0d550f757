"""What the commands share: opening the state, JSON or text, waiting with a live line."""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from autotuner.core.estimate import Estimate, in_words
from autotuner.edge import clock, statusfile
from autotuner.edge.files import lock_holder
from autotuner.edge.rows import Trial
from autotuner.edge.store import Store
from autotuner.errors import NotFound, Refused, TimedOut
from autotuner.settings import Settings, find_settings, load_settings

json_option = click.option("--json", "as_json", is_flag=True, help="Print data as JSON.")
slot_option = click.option("--slot", metavar="NAME", help="The slot meant; needed only if there are several.")


@dataclass(frozen=True)
class State:
    """The settings and the open store."""

    settings: Settings
    store: Store

    @property
    def daemon_pid(self) -> int | None:
        """The pid of the running daemon, None if none runs."""
        return lock_holder(self.settings.lock_file)

    def slot(self, wanted: str | None) -> str:
        """The slot that is meant. Raise NotFound or Refused."""
        names = list(self.settings.slots)
        if wanted is not None and wanted not in names:
            raise NotFound(f"there is no slot called {wanted}; known: {', '.join(names)}")
        if wanted is None and len(names) > 1:
            raise Refused(f"there are several slots; name one with --slot: {', '.join(names)}")
        return wanted or names[0]

    def slots(self, wanted: str | None) -> list[str]:
        """The slots to show: the one wanted, or all."""
        return [self.slot(wanted)] if wanted else list(self.settings.slots)

    def status(self) -> dict[str, Any]:
        """What the daemon last said of itself; empty if it is not running."""
        return statusfile.read(self.settings.state_dir) if self.daemon_pid is not None else {}

    def find_trial(self, what: str) -> Trial:
        """Given a trial's number, a candidate's name or id (or the start of its id), return its latest trial."""
        trials = self.store.trials()
        by_number = [t for t in trials if str(t.id) == what]
        found = by_number or [
            t for t in trials if t.name == what or (len(what) >= 6 and t.candidate_id.startswith(what))
        ]
        if not found:
            raise NotFound(f"there is no trial or candidate {what}; list them: autotuner queue, autotuner status --all")
        return found[-1]


def open_settings(ctx: click.Context) -> tuple[Path, Settings]:
    """Find and read the settings."""
    path = find_settings(ctx.obj)
    return path, load_settings(path)


def open_state(ctx: click.Context) -> State:
    """Read the settings and open the store."""
    _, settings = open_settings(ctx)
    return State(settings, Store(settings.database))


def print_json(data: Any) -> None:
    """Print data as JSON, for programs. A number that is not finite, which JSON does not have, is null."""
    click.echo(json.dumps(_finite(data), indent=2, ensure_ascii=False, default=str, allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def table(rows: Sequence[tuple[str, ...]], header: tuple[str, ...]) -> str:
    """Given rows, return them as aligned columns for a terminal; numbers stand right."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    numeric = [all(_is_number(row[i]) for row in rows) and bool(rows) for i in range(len(header))]
    lines = []
    for row in cells:
        shown = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)]
        lines.append("  ".join(shown).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def wait_until(
    done: Callable[[], bool], describe: Callable[[], str], timeout_s: float | None, *, quiet: bool = False
) -> None:
    """Wait with a live line until `done`. Raise TimedOut after `timeout_s`, if that is set."""
    until = clock.monotonic_s() + timeout_s if timeout_s is not None else None
    with live_line(quiet=quiet) as show:
        while not done():
            if until is not None and clock.monotonic_s() > until:
                raise TimedOut(f"not done within {timeout_s:.0f} s; it goes on: autotuner status")
            show(describe())
            clock.pause(0.2)


@contextmanager
def live_line(*, quiet: bool = False) -> Any:
    """Give a function that shows one line in place; on no terminal it prints the line whenever its head changes."""
    last = ""
    terminal = sys.stderr.isatty()

    def show(text: str) -> None:
        nonlocal last
        if quiet:
            return
        if terminal:
            width = _terminal_width()
            click.echo("\r\x1b[2K" + text[: width - 1], nl=False, err=True)
        elif text.partition(" · ")[0] != last.partition(" · ")[0]:
            click.echo(text, err=True)
        last = text

    try:
        yield show
    finally:
        if terminal and not quiet:
            click.echo("\r\x1b[2K", nl=False, err=True)


def describe_slot(status: dict[str, Any], slot: str, now_s: float) -> str:
    """Given the daemon's status, return one slot's state as a line: the decision, then what moves, after a dot."""
    mine = status.get("slots", {}).get(slot)
    if not mine:
        return "waiting for the daemon"
    live = mine.get("live") or {}
    parts = [str(mine.get("sentence", ""))]
    if mine.get("action") == "Wait" and live.get("stage") and mine["sentence"].startswith(("waiting", "measuring")):
        said = in_words(Estimate(live.get("stage_usual_s"), live.get("remaining_s"), bool(live.get("overdue"))))
        parts.append(", ".join(part for part in (live.get("progress") or live["stage"], said) if part))
        if live.get("output_tok_s"):
            parts.append(f"{live['output_tok_s']:.1f} tok/s")
        if live.get("accept_len"):
            needed = f" of {live['needed']:.2f} needed" if live.get("needed") else ""
            parts.append(f"accept length {live['accept_len']:.2f}{needed}")
        if live.get("since_s"):
            usual = f" of about {live['usual_s']:.0f} s" if live.get("usual_s") else ""
            parts.append(f"{max(0.0, now_s - live['since_s']):.0f} s{usual}")
    return " · ".join(part for part in parts if part)


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "").replace("-", "").replace("±", "").replace(
        " ", ""
    ).isdigit() or text in {"-", ""}


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size((100, 24)).columns


def user_cache() -> Path:
    """Where answers are kept where there are no settings to say it."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "autotuner"
