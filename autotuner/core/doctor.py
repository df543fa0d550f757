"""What was seen of a host -> findings: ok, warning or problem, one sentence each, and what to do. Pure.

A problem keeps autotuner from its work, or its promises from being true; a warning is what a person should know. What could
not be looked at (None, or no such program) is said only where it would have mattered.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum

EXPOSURE_MAX = {"autotuner.service": 1.5, "autotuner-server@.service": 3.5}  # of systemd-analyze security
CLOCK_JUMP_S = 30.0
BALLAST_BYTES = 4 << 20


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what it is about, how bad, a sentence, and what to do if anything."""

    about: str
    level: Level
    sentence: str
    do: str = ""


@dataclass(frozen=True)
class UnitSeen:
    """A systemd unit: `enabled` and `active` as systemctl prints them, its exposure level if that could be computed."""

    name: str
    installed: bool
    enabled: str = ""
    active: str = ""
    exposure: float | None = None


@dataclass(frozen=True)
class GpuSeen:
    """A GPU as nvidia-smi describes it; empty texts where it does not say."""

    index: int
    driver: str = ""
    mig: str = ""
    ecc: str = ""
    uncorrected: int = 0


@dataclass(frozen=True)
class FileSeen:
    """A secret file: whether this user may read it, and its permission bits; None if there is none."""

    path: str
    readable: bool
    mode: int | None


@dataclass(frozen=True)
class Seen:
    """Everything that was looked at. Texts that are empty, and lists without items, mean that nothing is wrong.

    `elsewhere` maps slots on other hosts to those: nothing else here is about them. `topology` says how the GPUs of each slot
    that has several are joined.
    `gpu_nodes` are the driver's device files of GPUs, `gpus_unread` has, by slot, why the running daemon cannot read its GPUs,
    whatever this user can.
    """

    settings_error: str = ""
    record_error: str = ""
    warnings: tuple[str, ...] = ()
    daemon_pid: int | None = None
    systemd: bool = False
    units: tuple[UnitSeen, ...] = ()
    rung: str = ""
    slot_gpus: frozenset[int] = frozenset()
    gpus: tuple[GpuSeen, ...] | None = None
    gpu_nodes: tuple[str, ...] = ()
    gpus_unread: dict[str, str] = field(default_factory=dict)
    strangers: tuple[str, ...] = ()
    orphans: tuple[tuple[int, str, str], ...] = ()
    disk_free_mib: float = 0.0
    disk_least_mib: int = 0
    ballast_bytes: int = BALLAST_BYTES
    launch_folders: int = 0
    launch_bytes: int = 0
    cuts_logs: bool = True
    ntp: str = ""
    clock_jumped_s: float | None = None
    engines: tuple[tuple[str, str, str | None], ...] = ()
    secret_files: tuple[FileSeen, ...] = ()
    state_mode: int | None = None
    database: str = "ok"
    journal_flaws: tuple[str, ...] = ()
    journal_entries: int = 0
    states: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    topology: tuple[str, ...] = ()


def examine(seen: Seen) -> tuple[Finding, ...]:
    """Given what was seen of a host, return every finding, in the order in which one would mend them."""
    if seen.settings_error:
        return (
            _problem("settings", seen.settings_error, "mend the file; `autotuner validate` shows it with line and key"),
        )
    if seen.record_error:
        do = "mend the disk or the permissions; else stop the daemon and go back to a copy of state.db"
        return (_problem("record", seen.record_error, do),)
    parts = (
        *(_settings, _record, _daemon, _units, _rung, _gpus, _others, _disk, _clock, _engines, _secrets, _elsewhere),
        _slots,
    )
    return tuple(finding for part in parts for finding in part(seen))


def worst(findings: tuple[Finding, ...]) -> Level:
    """Given findings, return the worst level among them."""
    return max((f.level for f in findings), key=list(Level).index, default=Level.OK)


def exposure(said: str) -> float | None:
    """Given what `systemd-analyze security` prints, return the overall exposure level; None if it says none."""
    found = re.search(r"Overall exposure level for .*?:\s+(\d+(?:\.\d+)?)", said)
    return float(found.group(1)) if found else None


def read_gpus(said: str) -> tuple[GpuSeen, ...]:
    """Given nvidia-smi's CSV of index, driver, MIG mode, ECC mode and uncorrected errors, return the GPUs."""
    found = []
    for line in said.splitlines():
        fields = [text.strip() for text in line.split(",")]
        if len(fields) == 5 and fields[0].isdecimal():
            words = ["" if text.startswith("[") else text for text in fields]
            errors = int(words[4]) if words[4].isdecimal() else 0
            found.append(GpuSeen(int(fields[0]), words[1], words[2], words[3], errors))
    return tuple(found)


def _ok(about: str, sentence: str) -> Finding:
    return Finding(about, Level.OK, sentence)


def _warning(about: str, sentence: str, do: str) -> Finding:
    return Finding(about, Level.WARNING, sentence, do)


def _problem(about: str, sentence: str, do: str) -> Finding:
    return Finding(about, Level.PROBLEM, sentence, do)


def _settings(seen: Seen) -> list[Finding]:
    said = [_warning("settings", text, "change the settings, then reload the daemon") for text in seen.warnings]
    return said or [_ok("settings", "settings and policies are valid")]


def _record(seen: Seen) -> list[Finding]:
    found = []
    if seen.database == "ok":
        found.append(_ok("record", "the state database is intact"))
    else:
        do = "stop the daemon and go back to a copy of state.db; the journal tells what came after it"
        found.append(_problem("record", f"SQLite's quick check says: {seen.database}", do))
    if seen.journal_flaws:
        more = f" (and {len(seen.journal_flaws) - 1} more)" if len(seen.journal_flaws) > 1 else ""
        do = "find out who changed it: autotuner journal verify; the daemon writes it anew from the record at its next start"
        found.append(_problem("record", f"the journal does not verify: {seen.journal_flaws[0]}{more}", do))
    else:
        found.append(_ok("record", f"the journal verifies, {seen.journal_entries} entries"))
    if seen.state_mode is not None and seen.state_mode & 0o002:
        do = "chmod o-w the folder: whoever writes there decides what is launched"
        found.append(_problem("record", "everybody may write into the state folder", do))
    return found


def _daemon(seen: Seen) -> list[Finding]:
    if seen.daemon_pid is None:
        return [
            _problem("daemon", "no daemon works this state folder", "systemctl start autotuner, or: autotuner daemon")
        ]
    return [_ok("daemon", f"the daemon runs, pid {seen.daemon_pid}")]


def _units(seen: Seen) -> list[Finding]:
    if not seen.systemd:
        return [_ok("units", "no systemd manages this host; the daemon runs without a unit")]
    found = []
    for unit in seen.units:
        if not unit.installed:
            found.append(_warning("units", f"{unit.name} is not installed", "as root: make install-service"))
            continue
        if "@" not in unit.name:
            found += _service(unit)
        most = EXPOSURE_MAX.get(unit.name)
        if unit.exposure is not None and most is not None and unit.exposure > most:
            do = f"look for what a drop-in takes away: systemd-analyze security {unit.name}"
            said = f"the exposure of {unit.name} is {unit.exposure:g}, more than {most:g}"
            found.append(_warning("units", said, do))
    return found


def _service(unit: UnitSeen) -> list[Finding]:
    found = []
    if unit.active != "active":
        do = f"systemctl start {unit.name}; journalctl -u {unit.name} says why it ended"
        found.append(_problem("units", f"{unit.name} is {unit.active or 'not active'}", do))
    if not unit.enabled.startswith("enabled"):
        do = f"systemctl enable {unit.name}"
        found.append(
            _warning("units", f"{unit.name} does not start with the host ({unit.enabled or 'not enabled'})", do)
        )
    return found or [_ok("units", f"{unit.name} is enabled and active")]


def _rung(seen: Seen) -> list[Finding]:
    return [_ok("launching", seen.rung)] if seen.rung else []


def _gpus(seen: Seen) -> list[Finding]:
    if not seen.slot_gpus:
        return [_ok("GPUs", "no slot names a GPU")]
    if seen.gpus is None and seen.gpu_nodes:
        do = "run nvidia-smi, which says why: mostly a driver that was upgraded under a running one (reboot) or a dead GPU"
        return [_problem("GPUs", f"{seen.gpu_nodes[0]} is there, and nvidia-smi does not answer", do)]
    if seen.gpus is None:
        do = "install the NVIDIA driver, or take `gpus` out of the slots"
        return [_problem("GPUs", "slots name GPUs, and nvidia-smi does not answer", do)]
    found = [_unread(slot, why) for slot, why in seen.gpus_unread.items()]
    there = {gpu.index: gpu for gpu in seen.gpus}
    for index in sorted(seen.slot_gpus - there.keys()):
        do = "nvidia-smi and the kernel's log (Xid) say where it is; else correct `gpus` of its slot"
        found.append(_problem("GPUs", f"GPU {index}, which a slot names, is not there", do))
    for index in sorted(seen.slot_gpus & there.keys()):
        gpu = there[index]
        if gpu.uncorrected:
            do = "drain the host and have the GPU looked at: nvidia-smi -q -d ECC,ROW_REMAPPER"
            found.append(_problem("GPUs", f"GPU {index} has {gpu.uncorrected} uncorrected memory errors", do))
        if gpu.mig.lower() == "enabled":
            do = "name MIG devices in the candidates, or switch MIG off: nvidia-smi -i N -mig 0"
            found.append(_warning("GPUs", f"GPU {index} is split (MIG), so its index stands for no whole GPU", do))
    driver = next((gpu.driver for gpu in seen.gpus if gpu.driver), "unknown")
    found = found or [_ok("GPUs", f"{len(seen.slot_gpus)} GPUs are there, driver {driver}")]
    return found + [_ok("GPUs", said) for said in seen.topology]


def _unread(slot: str, why: str) -> Finding:
    """The daemon cannot read GPUs that this user can: its unit keeps them from it, or they hang now and then."""
    do = (
        "sudo -u autotuner nvidia-smi; if that works, it is the daemon's unit: systemctl restart autotuner-devices autotuner,"
        " else look at its DeviceAllow= (char-nvidia* rw) and, for nodes of a group, SupplementaryGroups=video render"
    )
    said = f"the daemon cannot read the GPUs of slot {slot}, so that it cannot tell whether their memory is free: {why}"
    return _problem("GPUs", said, do)


def _others(seen: Seen) -> list[Finding]:
    do = "end it if it is not wanted; autotuner never touches what it did not launch"
    found = [_warning("strangers", text, do) for text in seen.strangers]
    for pid, launch, why in seen.orphans:
        do = f"look at it (ps -fp {pid}) and end it if nothing else needs it: kill {pid}"
        found.append(_problem("orphans", f"process {pid} belongs to launch {launch}, {why}", do))
    return found or [_ok("strangers", "nobody else holds a slot's port or GPU, and no launch is forgotten")]


def _disk(seen: Seen) -> list[Finding]:
    free, used = (
        f"{seen.disk_free_mib:,.0f} MiB are free",
        f"{seen.launch_folders} launches take {seen.launch_bytes >> 20:,} MiB",
    )
    if seen.disk_free_mib < seen.disk_least_mib:
        do = "free space: no trial is begun until then; fewer `keep_launches` keep fewer logs"
        return [_problem("disk", f"only {free}, {seen.disk_least_mib} are asked for; {used}", do)]
    found = []
    if seen.ballast_bytes < BALLAST_BYTES and seen.daemon_pid is not None:
        do = "free space; the daemon takes it again at its next start"
        found.append(_warning("disk", "the ballast was given up, so the disk was full", do))
    if not seen.cuts_logs:
        do = "watch the size of the logs below `launches`, or move `log_dir` to ext4, XFS, Btrfs or tmpfs"
        found.append(_warning("disk", "this file system cannot cut the middle out of a log that grows without end", do))
    return [_ok("disk", f"{free}; {used}"), *found]


def _clock(seen: Seen) -> list[Finding]:
    found = []
    if seen.clock_jumped_s is not None and abs(seen.clock_jumped_s) > CLOCK_JUMP_S:
        do = "nothing is decided by the wall clock, but for windows and deadlines; times in the journal before that are off"
        found.append(
            _warning("clock", f"the wall clock was set by {seen.clock_jumped_s:+.0f} s since the last launch", do)
        )
    if seen.ntp == "no":
        do = "timedatectl set-ntp true, or chrony"
        found.append(_warning("clock", "the wall clock is not synchronised", do))
    return found or [_ok("clock", "the wall clock is in step" if seen.ntp else "the wall clock was not set meanwhile")]


def _engines(seen: Seen) -> list[Finding]:
    found = []
    for name, engine, version in seen.engines:
        if version is None:
            do = f"autotuner validate tells what is missing for {name}"
            found.append(_warning("engines", f"the version of {engine}, which {name} uses, cannot be told here", do))
        else:
            found.append(_ok("engines", f"{name} uses {engine} {version}"))
    return found


def _secrets(seen: Seen) -> list[Finding]:
    found = []
    for file in seen.secret_files:
        if file.mode is None:
            do = "write it, or take it out of `secret_files`: no server of its slot can start"
            found.append(_problem("secrets", f"there is no secret file {file.path}", do))
        elif file.mode & 0o006:
            do = f"chmod 0640 {file.path}, and take the secret for known"
            found.append(_problem("secrets", f"everybody on this host may read or change {file.path}", do))
        elif not file.readable:
            do = "give it to the daemon's user or group; or run this as that user: sudo -u autotuner autotuner doctor"
            found.append(_problem("secrets", f"{file.path} cannot be read by this user", do))
    return found or (
        [_ok("secrets", f"{len(seen.secret_files)} secret files, readable for few")] if seen.secret_files else []
    )


def _elsewhere(seen: Seen) -> list[Finding]:
    return [
        Finding(
            "hosts",
            Level.OK,
            f"slot {name} is on host {host}, which is not looked at from here",
            f"autotuner hosts test {host}",
        )
        for name, host in seen.elsewhere.items()
    ]


def _slots(seen: Seen) -> list[Finding]:
    do = "read `autotuner journal tail`, mend the cause, then `autotuner restore-best`"
    found = [_problem("slots", f"slot {name} is degraded: {why}", do) for name, why in seen.states.items() if why]
    return found or [_ok("slots", f"no slot needs a person ({', '.join(seen.states)})")]
