"""Looks at a host for `autotuner doctor`: units, GPUs, processes, disk, clock, files. Starts, stops and changes nothing.

What it means is said by `core/doctor.py`. A program that is not installed, or does not answer, leaves its part unsaid.
"""

import datetime as dt
import os
import shutil
import tempfile
from pathlib import Path

from autotuner.core import doctor
from autotuner.core import topology as joining
from autotuner.core.state import TrialState
from autotuner.edge import ballast, clock, housekeeping, procfs, statusfile
from autotuner.edge.destination import LOCAL
from autotuner.edge.files import lock_holder
from autotuner.edge.host import Host, Ran, launch_of_rank
from autotuner.edge.store import Store
from autotuner.errors import HostError
from autotuner.installed import engine_version
from autotuner.preflight import place_warnings
from autotuner.publishing import checked
from autotuner.settings import Settings, Slot, load_policies

ASK_S = 20.0
DEVICES = Path("/dev")
ENGINES_MAX = 8  # candidates whose engine is asked for its version: each may take seconds
SYSTEMD_RUNS = Path("/run/systemd/system")
UNITS = ("autotuner.service", "autotuner-server@.service")
GPU_QUERY = (
    *("nvidia-smi", "--format=csv,noheader,nounits"),
    "--query-gpu=index,driver_version,mig.mode.current,ecc.mode.current,ecc.errors.uncorrected.volatile.total",
)
NO_ENGINE = {"command"}  # any program: there is no version to ask for


async def look(settings: Settings, store: Store, host: Host) -> doctor.Seen:
    """Given the settings, the record and the host, return what is seen. Raise InvalidInput for policies that are wrong."""
    load_policies(settings)
    journals = checked(settings, store)
    room = housekeeping.room(settings.launches)
    parts = [(name, rank, own.on(rank)) for name, own in settings.slots.items() for rank in range(len(own.members))]
    here = [(name, own) for name, _, own in parts if own.host == LOCAL]
    return doctor.Seen(
        warnings=settings.warnings,
        daemon_pid=lock_holder(settings.lock_file),
        systemd=_systemd(),
        units=tuple([await _unit(host, name) for name in UNITS if _systemd()]),
        rung=await _rung(host),
        slot_gpus=frozenset(index for _, slot in here for index in slot.gpus),
        gpus=await _gpus(host),
        gpu_nodes=_gpu_nodes(),
        gpus_unread=_unread(settings, here),
        strangers=await _strangers(here, store, host),
        orphans=tuple(_orphans(settings, store)),
        disk_free_mib=shutil.disk_usage(_there(settings.state_dir)).free / 2**20,
        disk_least_mib=settings.disk_free_min_mib,
        ballast_bytes=_size(settings.state_dir / ballast.NAME),
        launch_folders=room.folders,
        launch_bytes=room.bytes,
        cuts_logs=_cuts_logs(settings.launches),
        ntp=await _ntp(host),
        clock_jumped_s=_clock_jumped_s(store),
        engines=await _engines({name for name, _ in here}, store, host),
        secret_files=tuple(_secret(path) for _, slot in here for path in slot.secret_files.values()),
        state_mode=_there(settings.state_dir).stat().st_mode if settings.state_dir.is_dir() else None,
        database=store.db.check(),
        journal_flaws=tuple(str(flaw) for read in journals for flaw in read.flaws),
        journal_entries=sum(len(read.entries) for read in journals),
        states={name: store.slot(name).degraded for name in settings.slots},
        elsewhere={
            f"{name}, rank {rank}," if settings.slots[name].nodes else name: own.host
            for name, rank, own in parts
            if own.host != LOCAL
        },
        topology=await _topology(here, host),
    )


def _systemd() -> bool:
    return SYSTEMD_RUNS.is_dir()


async def _ask(host: Host, *argv: str) -> Ran | None:
    """What a program says; None where it is not installed or does not answer."""
    if shutil.which(argv[0]) is None:
        return None
    try:
        return await host.run(argv, ASK_S)
    except HostError:
        return None


async def _unit(host: Host, name: str) -> doctor.UnitSeen:
    template = "@" in name
    shown = await _ask(host, "systemctl", "cat", name.replace("@.", "@x.") if template else name)
    if shown is None or shown.code != 0:
        return doctor.UnitSeen(name, installed=False)
    enabled = None if template else await _ask(host, "systemctl", "is-enabled", name)
    active = None if template else await _ask(host, "systemctl", "is-active", name)
    said = await _ask(host, "systemd-analyze", "security", "--no-pager", name.replace("@.", "@x."))
    return doctor.UnitSeen(
        name,
        installed=True,
        enabled=enabled.output.strip() if enabled else "",
        active=active.output.strip() if active else "",
        exposure=doctor.exposure(said.output) if said else None,
    )


async def _rung(host: Host) -> str:
    """How servers are launched here and why, where the host's launcher can tell."""
    ask = getattr(host, "rung", None)
    if ask is None:
        return ""
    rung = await ask()
    return f"servers are launched by: {rung.name}" + (f" ({rung.why})" if rung.why else "")


async def _gpus(host: Host) -> tuple[doctor.GpuSeen, ...] | None:
    ran = await _ask(host, *GPU_QUERY)
    return doctor.read_gpus(ran.output) if ran is not None and ran.code == 0 else None


async def _topology(here: list[tuple[str, Slot]], host: Host) -> tuple[str, ...]:
    """How the GPUs of each slot that names several are joined, each sentence once."""
    several = [slot.gpus for _, slot in here if len(slot.gpus) > 1]
    ran = await _ask(host, *joining.QUERY) if several else None
    found = joining.parse(ran.output) if ran is not None and ran.code == 0 else None
    return tuple(dict.fromkeys(said for gpus in several if (said := joining.joined(found, gpus))))


def _gpu_nodes() -> tuple[str, ...]:
    return tuple(sorted(map(str, DEVICES.glob("nvidia[0-9]*"))))


def _unread(settings: Settings, here: list[tuple[str, Slot]]) -> dict[str, str]:
    """What the daemon itself says of GPUs that it cannot read: its sandbox is not ours."""
    if lock_holder(settings.lock_file) is None:
        return {}
    slots = statusfile.read(settings.state_dir).get("slots", {})
    said = {name: slots.get(name, {}).get("gpus_unread", "") for name, _ in here}
    return {name: why for name, why in said.items() if why}


async def _strangers(here: list[tuple[str, Slot]], store: Store, host: Host) -> tuple[str, ...]:
    found: list[str] = []
    for name, slot in here:
        ours = {row.id for row in store.open_launches(name)}
        try:
            found += await place_warnings(host, slot, ours)
        except HostError as error:
            found.append(f"slot {name} could not be looked at: {error}")
    return tuple(found)


def _orphans(settings: Settings, store: Store) -> list[tuple[int, str, str]]:
    """Processes of launches that should be over, or that the record does not know though their folder is here."""
    open_ones = {row.id for name in settings.slots for row in store.open_launches(name)}
    found = []
    for pid in procfs.pids():
        launch = procfs.launch_id_of(pid)
        if launch is None or launch_of_rank(launch) in open_ones or procfs.start_ticks(pid) is None:
            continue
        if store.has_ended(launch_of_rank(launch)):
            found.append((pid, launch, "which is on record as ended"))
        elif (settings.launches / launch).is_dir():
            found.append((pid, launch, "of which there is no record"))
    return found


async def _ntp(host: Host) -> str:
    ran = await _ask(host, "timedatectl", "show", "--property=NTPSynchronized", "--value")
    return ran.output.strip() if ran is not None and ran.code == 0 else ""


def _clock_jumped_s(store: Store) -> float | None:
    """By how much the wall clock has moved against the monotonic one since the last launch of this boot; None without one."""
    newest = "SELECT intended_at, mono_s FROM launches WHERE boot_id = ? ORDER BY rowid DESC LIMIT 1"
    last = store.db.one(newest, clock.boot_id())
    if last is None:
        return None
    then = dt.datetime.strptime(last["intended_at"], "%Y-%m-%d %H:%M:%SZ").replace(tzinfo=dt.UTC)
    return (clock.utc_now() - then).total_seconds() - (clock.monotonic_s() - float(last["mono_s"]))


async def _engines(here: set[str], store: Store, host: Host) -> tuple[tuple[str, str, str | None], ...]:
    """(candidate, engine, version) of the best-known ones and of what waits."""
    wanted: dict[str, None] = {}
    for name in sorted(here):
        wanted |= dict.fromkeys(candidate for candidate, _, _ in store.ladder(name)[:1])
        wanted |= dict.fromkeys(t.candidate_id for t in store.trials(name) if t.state is TrialState.QUEUED)
    asked = [c for c in map(store.candidate, list(wanted)[:ENGINES_MAX]) if c.engine not in NO_ENGINE]
    return tuple([(c.name, c.engine, await engine_version(host, c)) for c in asked])


def _secret(path: str) -> doctor.FileSeen:
    try:
        mode = Path(path).stat().st_mode & 0o777
    except OSError:
        mode = None
    return doctor.FileSeen(path, os.access(path, os.R_OK), mode)


def _there(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: the daemon makes it at its first start."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _cuts_logs(folder: Path) -> bool:
    """Try it on a file of our own beside the logs; a folder that cannot be written says nothing."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as trial:
            trial.write(bytes(range(1, 129)) * (1 << 14))
            trial.flush()
            return _cut(Path(trial.name))
    except OSError:
        return True


def _cut(path: Path) -> bool:
    try:
        housekeeping.cut_log(path, 1 << 16)
    except OSError:
        return False
    return True
