"""P7, P9, P16: the journals' own code on a disk in memory, power lost at every operation, everything found that may be found.

A reference run decides in two slots, publishes, restarts and meets full and failing disks, with the daemon's own publishing, the
real journals, seals and files; half of the runs begin with one journal of all slots, as earlier versions had it. After each
operation stands a snapshot of the disk; from each, disks are made as power loss may leave them (unsynced operations missing,
reordered, torn at a byte, zeros, turned bits, names that never became durable), the daemon's code is started on each, and then
nothing that was acknowledged may be missing, what was cut off must be kept aside and named, the next entries must verify, and
the first key may doubt no seal, before and after. Recovery is interrupted in the same way, up to three times, and so is the
daemon that follows one that was killed, whose last operations may be in memory alone. The record stands for the database, which
has a part of its own.
"""

import errno
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from autotuner import publishing
from autotuner.cli.sealing import Sealing
from autotuner.core.entry import Draft
from autotuner.edge import ballast, files, journal, seals, statusfile
from autotuner.edge.outbox import COMMON
from autotuner.edge.seals import begin
from autotuner.errors import AutotunerError, StoreError
from torture.crashrecord import FILE_BYTES, SLOTS, Daemon, Quiet, Record, settings_on
from torture.disk import Disk, DiskPath, Loss, ShortWriteError, System
from torture.tally import Tally

FIRST_KEY = b"first key of this reference run!"
OF_ONE_SNAPSHOT = 12  # crash states sampled of each snapshot, beside the fixed ones
FIXED = tuple(Loss(names, data) for names in ("all", "none") for data in ("all", "none"))
KILLS = 3  # how often a daemon that was killed at a snapshot is followed by one that works until power is lost
SOON, LATE = 16, 120  # operations of a start within which power is lost: while it recovers, or while it works already
DEEPER = (0, 0, 0, 0, 0, 0, 1, 3)  # how often a recovery is interrupted in turn
AGAIN = "cd tests && python -m torture.crashstates {seed} {number}"


class Switch:
    """Stands for the `os` module in the modules under test, and leads to the disk that is looked at now."""

    system: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.system, name)


SWITCH = Switch()


@contextmanager
def on_memory() -> Iterator[None]:
    """The modules that write durable files use the disk in memory."""
    modules: tuple[Any, ...] = (files, journal, seals, statusfile, ballast)
    real, room = [module.os for module in modules], ballast.BALLAST_BYTES
    clock_and_log = publishing.clock, publishing.log
    publishing.clock = SimpleNamespace(utc_label=lambda: "2026-02-01 00:00:00Z")  # type: ignore[assignment]
    publishing.log = SimpleNamespace(get=Quiet)  # type: ignore[assignment]
    ballast.BALLAST_BYTES = 4096  # its size is not what is tried
    for module in modules:
        module.os = SWITCH
    try:
        yield
    finally:
        for module, old in zip(modules, real, strict=True):
            module.os = old
        ballast.BALLAST_BYTES = room
        publishing.clock, publishing.log = clock_and_log


@dataclass(frozen=True)
class Snapshot:
    """The disk after an operation, and what was acknowledged by then: entries, and the version of a file written as a whole."""

    disk: Disk
    entries: int
    published: dict[str, int]
    acknowledged: dict[str, int]
    version: int
    failing: bool


@dataclass
class Run:
    """A reference run, and the snapshots of it."""

    rng: random.Random
    disk: Disk = field(default_factory=Disk)
    record: Record = field(default_factory=lambda: Record([], {}))
    snapshots: list[Snapshot] = field(default_factory=list)
    version: int = 0
    month: int = 1
    failing: bool = False
    earlier: bool = False  # it is the version that had one journal of all slots
    acknowledged: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        SWITCH.system = System(self.disk)
        self.daemon = self.started()
        self.disk.after = self.record.after = self.look

    def look(self) -> None:
        """Keep what there is after an operation. What was acknowledged once is owed for ever."""
        for known in (self.daemon.acknowledged, self.record.published_to):
            self.acknowledged |= {name: max(number, self.acknowledged.get(name, 0)) for name, number in known.items()}
        self.snapshots.append(
            Snapshot(
                self.disk.copy(),
                len(self.record.entries),
                dict(self.record.published_to),
                dict(self.acknowledged),
                self.version,
                self.failing,
            )
        )

    def started(self) -> Daemon:
        return Daemon(self.disk, self.record, common_only=self.earlier)

    def step(self) -> None:
        """Something that a daemon does or meets."""
        kind = self.rng.choice(("decide", "decide", "decide", "restart", "file", "fault", "fault", "month", "other"))
        if kind == "decide":
            for _ in range(self.rng.choice((1, 1, 2))):
                self.decide()
            self.publish()
        elif kind == "restart":
            self.earlier = False  # what is started anew may be the next version
            self.daemon = self.started()
            self.publish()
        elif kind == "file":
            self.write_whole()
        elif kind == "fault":
            self.meet_a_fault()
        elif kind == "month":
            self.month = max(1, min(12, self.month + self.rng.choice((-1, 1, 1))))
        else:
            self.write_others()

    def decide(self) -> None:
        quote = tuple("word " * self.rng.randrange(1, 12) for _ in range(self.rng.randrange(4)))
        at = f"2026-{self.month:02d}-01 00:00:00Z"
        draft = Draft(self.rng.choice(SLOTS), "tried", "It was tried.", (("Rule", "x"),), quote=quote)
        self.record.add_entry(draft, at, journal=COMMON if self.earlier else None)

    def publish(self) -> None:
        heads = {name: self.record.outbox(name).head[0] for name in self.record.journals()}
        if not self.daemon.well or any(self.daemon.acknowledged.get(name) != number for name, number in heads.items()):
            self.daemon.publish()

    def write_whole(self) -> None:
        """A file that is replaced as a whole: a launch, a proposal, a campaign."""
        path = DiskPath("/state/whole.json").on(self.disk)
        files.write_atomically(path, b"version %d\n" % (self.version + 1) * 40)  # type: ignore[arg-type]
        self.version += 1
        self.look()

    def write_others(self) -> None:
        """Files that may be lost, and must not be in the way: the status and the ballast."""
        folder: Any = DiskPath("/state").on(self.disk)
        statusfile.write(folder, {"pid": 1, "trouble": "x" * self.rng.randrange(2000)})
        kept = ballast.Ballast(folder)
        self.rng.choice((kept.take, kept.drop))()

    def meet_a_fault(self) -> None:
        """The N-th operation of a kind fails once, or the disk takes a part of it; the daemon goes on in its next cycle."""
        kind, error = self.rng.choice(
            (
                ("fsync", OSError(errno.EIO, "Input/output error")),
                ("fsync", OSError(errno.EIO, "Input/output error")),
                ("write", OSError(errno.ENOSPC, "No space left on device")),
                ("write", ShortWriteError(self.rng.random())),
                ("create", OSError(errno.ENOSPC, "No space left on device")),
                ("rename", OSError(errno.EIO, "Input/output error")),
            )
        )
        left = self.rng.choice((1, 1, 1, 2, 3, 4))  # the first is mostly that of the entry itself
        full = False

        def fault(what: str) -> None:
            nonlocal left, full
            if full and what in {"write", "ftruncate"} and self.rng.random() < 0.7:
                raise OSError(errno.ENOSPC, "No space left on device")
            if what == kind:
                left -= 1
                if left == 0:
                    self.failing = True
                    full = isinstance(error, ShortWriteError)
                    raise error

        self.disk.fault = fault
        try:
            self.decide()
            self.publish()
        except StoreError:
            pass
        self.disk.fault = None
        self.publish()


def reference(seed: int, number: int) -> Run:
    """Given a seed and a number, do the run that belongs to them."""
    rng = random.Random(f"crash states {seed}/{number}")
    run = Run(rng, earlier=rng.random() < 0.5)
    files.make_folder(DiskPath("/state").on(run.disk))  # type: ignore[arg-type]
    run.publish()
    if rng.random() < 0.5:
        begin(settings_on(run.disk).seal_key, max(1, run.record.outbox(COMMON).head[0]), FIRST_KEY)
    for _ in range(rng.randrange(4, 9)):
        run.step()
    return run


def losses(rng: random.Random, snapshot: Snapshot) -> Iterator[Loss]:
    """What power loss is tried to do to a snapshot: everything or nothing of it, each byte of one write, and samples."""
    yield from FIXED
    longest = _longest_write(snapshot)
    if longest and rng.random() < 0.1:
        for torn in range(longest):
            yield Loss("all", "all", torn)
    for _ in range(OF_ONE_SNAPSHOT):
        yield sampled(rng, snapshot)


def sampled(rng: random.Random, snapshot: Snapshot) -> Loss:
    """One of the many things that power loss can do."""
    longest = _longest_write(snapshot)
    torn = rng.randrange(longest + 1) if longest and rng.random() < 0.6 else None
    zeros, flips = rng.choice(((0, 0), (0, 0), (1, 0), (2, 0), (0, 1), (0, 3), (1, 1)))
    names, data = rng.choice(("all", "none", "first", "some")), rng.choice(("all", "all", "first", "some"))
    return Loss(names, data, torn, zeros, flips)


def _longest_write(snapshot: Snapshot) -> int:
    files_now = snapshot.disk.names.values()
    return max((len(c[2]) for file in files_now for c in file.since if c[0] == "write"), default=0)


class Checker:
    """Starts the daemon's code on crash states and says what is wrong."""

    def __init__(self, run: Run, rng: random.Random, reach: int = SOON) -> None:
        self._run, self._rng, self._reach = run, rng, reach
        self.depth = 0

    def wrong(self, snapshot: Snapshot, found: Disk, deeper: int = 0) -> tuple[str, str] | None:
        """Given a snapshot and a disk that power loss made of it, return the broken promise and what was seen."""
        SWITCH.system = System(found)
        record = Record(list(self._run.record.entries[: snapshot.entries]), dict(snapshot.published))
        before = found.contents()
        doubted = _forged(found, record)
        daemon = Daemon(found, record)
        inner: list[Snapshot] = []
        # The operation of the recovery at which power is lost again.
        left = self._rng.randrange(1, self._reach) if deeper else 0

        def look() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                at = (len(record.entries), dict(record.published_to), snapshot.acknowledged)
                inner.append(Snapshot(found.copy(), *at, version=0, failing=snapshot.failing))

        found.after = look if deeper else None
        try:
            lost = self._lost(snapshot, daemon.open(), record)
            aside = _not_kept(before, found, record, snapshot.entries)
            daemon.publish()
            for slot in SLOTS:
                record.add_entry(Draft(slot, "after", "It went on."), "2026-12-31 00:00:00Z")
            daemon.publish()
            broken = lost or aside or (("P9", f"before the next start {doubted}") if doubted else None)
            broken = broken or _unverified(found, record) or _whole_file(snapshot, found, self._run.version)
        except AutotunerError as error:
            return "P9", f"the next start fails: {error}"
        found.after = None
        if broken or not inner:
            return broken
        self.depth += 1
        again = inner[0]
        kept = self._run.record.entries
        self._run.record.entries = record.entries
        try:
            rest = again.disk.after_power_loss(self._rng, sampled(self._rng, again))
            return self.wrong(again, rest, deeper - 1)
        finally:
            self._run.record.entries = kept

    @staticmethod
    def _lost(snapshot: Snapshot, numbers: dict[str, int], record: Record) -> tuple[str, str] | None:
        if any(entry.title == "journal altered" for _, entry in record.entries[snapshot.entries :]):
            return "P9", "power loss is taken for tampering"
        for name, owed in snapshot.acknowledged.items():
            if numbers.get(name, 0) < owed:
                promise = "P16" if snapshot.failing else "P7"
                return (
                    promise,
                    f"entry {owed} of journal {name!r} was acknowledged, the files go to {numbers.get(name)}",
                )
        return None


def _not_kept(before: dict[str, bytes], found: Disk, record: Record, known: int) -> tuple[str, str] | None:
    """What was in the files and is not any more must be kept aside, and an entry must name where."""
    now = found.contents()
    for path, data in before.items():
        if (".torn-" in path or ".altered-" in path) and "/." not in path and now.get(path) != data:
            return "P9", f"{path}, kept aside earlier, was written over"
        if not path.endswith(".md"):
            continue
        left = now.get(path, b"")
        if not data.startswith(left):
            return "P9", f"{path} was changed and not only cut"
        if cut := data[len(left) :]:
            kept = [p for p, d in now.items() if p.startswith(f"{path}.torn-") and d == cut]
            if not kept:
                return "P9", f"{len(cut)} bytes cut off {path} are not kept aside"
            if not any(kept[-1].rpartition("/")[2] in entry.text for _, entry in record.entries[known:]):
                return "P9", f"no entry names {kept[-1]}"
    return None


def _unverified(found: Disk, record: Record) -> tuple[str, str] | None:
    """The files must hold every entry of the record, each journal in its order, sealed where that was set up."""
    settings = settings_on(found)
    journals = publishing.checked(settings, record)  # type: ignore[arg-type]
    for read in journals:
        if read.flaws or list(read.entries) != record.outbox(read.slot).mine:
            what = read.flaws[0] if read.flaws else "the files are not the record"
            return "P9", f"after the next entry, in journal {read.slot!r}: {what}"
        if any(path.stat().st_size > FILE_BYTES for path in read.files):
            return "P9", "a journal file grew beyond its limit"
    if sorted(read.slot for read in journals) != sorted(record.journals()):
        return "P9", f"there are files of {[read.slot for read in journals]}"
    doubted = _forged(found, record, {read.slot: read.head[0] for read in journals})
    return ("P9", doubted) if doubted else None


def _forged(found: Disk, record: Record, ends: dict[str, int] | None = None) -> str:
    """What the first key says against the seals, as `verify --key` asks at any time; `ends` is how far they must go."""
    settings = settings_on(found)
    if not settings.seal_key.exists():
        return ""
    sealed = Sealing(settings, FIRST_KEY).check(publishing.checked(settings, record))  # type: ignore[arg-type]
    if sealed.flaws:
        return f"the seals look forged: {sealed.flaws[0]}"
    return "" if ends is None or sealed.last == ends else f"the seals go to {sealed.last} of {ends}"


def _whole_file(snapshot: Snapshot, found: Disk, latest: int) -> tuple[str, str] | None:
    """A file replaced as a whole is an old or a new one, never older than what was acknowledged, never a mixture."""
    data = found.contents().get("/state/whole.json")
    allowed = [b"version %d\n" % version * 40 for version in range(max(1, snapshot.version), latest + 2)]
    if data in allowed or (data is None and snapshot.version == 0):
        return None
    return (
        "P7",
        f"a file that was replaced as a whole is {(data or b'')[:30]!r}, version {snapshot.version} was acknowledged",
    )


def explore(tally: Tally, seed: int, number: int, until: float) -> None:
    """Try one reference run; stop at a time, but not before one snapshot is done."""
    explore_run(tally, reference(seed, number), f"run {number}: {AGAIN.format(seed=seed, number=number)}", until)


def explore_run(tally: Tally, run: Run, how: str, until: float = float("inf")) -> None:
    """Try every snapshot of a reference run: killed there, and power lost there in many ways."""
    checker, seen = Checker(run, run.rng), set[int]()
    killer = Checker(run, random.Random(f"killed in {how}"), LATE)
    for at, snapshot in enumerate(run.snapshots):
        for _ in range(KILLS):
            killed = killer.wrong(snapshot, snapshot.disk.after_kill(), deeper=1)
            if killed is not None:
                tally.broken(killed[0], f"killed: {killed[1]} (operation {at}, {how})")
        for loss in losses(run.rng, snapshot):
            found = snapshot.disk.after_power_loss(run.rng, loss)
            state = hash((at, tuple(sorted(found.contents().items()))))
            if state in seen:
                continue
            seen.add(state)
            broken = checker.wrong(snapshot, found, deeper=run.rng.choice(DEEPER))
            for promise in ("P7", "P9", *(("P16",) if snapshot.failing else ())):
                if broken is None or broken[0] != promise:
                    tally.held(promise)
            if broken is not None:
                tally.broken(broken[0], f"{broken[1]} (operation {at}, {loss}, {how})")
        if time.monotonic() > until:
            break
    tally.counts["crash states"] += len(seen)
    tally.counts["crash states of a recovery"] += checker.depth
    tally.counts["crash states after a kill"] += killer.depth


def run(seed: int, seconds: float) -> Tally:
    """Explore reference runs until the time is over."""
    tally, until, number = Tally(), time.monotonic() + seconds, 0
    with on_memory():
        while number == 0 or time.monotonic() < until:
            explore(tally, seed, number, until)
            number += 1
    tally.counts["reference runs"] = number
    return tally


if __name__ == "__main__":
    result = Tally()
    with on_memory():
        explore(result, int(sys.argv[1]), int(sys.argv[2]), float("inf"))
    print(result.as_json())
