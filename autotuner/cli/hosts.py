"""`hosts`: set a host up, with its key compared and pinned; list, try and pin again."""

import asyncio
import contextlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from autotuner.cli.common import json_option, open_settings, print_json, table
from autotuner.core import topology
from autotuner.edge import clock
from autotuner.edge.destination import NAME_PATTERN, Destination, fingerprint
from autotuner.errors import HostError, NotFound, Refused
from autotuner.settings import Settings, Slot

USUAL_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
TIME_OFF_MAX_S = 2.0
TOPOLOGY_TIMEOUT_S = 20.0

fingerprint_option = click.option(
    "--fingerprint",
    "expected",
    metavar="SHA256:…",
    help="The key's fingerprint as the host itself says it; then nothing is asked.",
)


@dataclass
class Check:
    """One thing that was looked at on a host: what, whether it is well, what was found or is to be done."""

    what: str
    ok: bool
    said: str


@click.group()
def hosts() -> None:
    """Other machines with slots on them, reached over SSH. A host is known by its pinned key and by nothing else."""


@hosts.command("add")
@click.argument("name")
@click.argument("where", metavar="USER@ADDRESS")
@click.option("--port", type=click.IntRange(1, 65535), default=22, show_default=True)
@click.option("--jump", default="", metavar="NAME", help="A host of the settings to go through.")
@click.option("--identity", type=click.Path(path_type=Path), metavar="FILE", help="Our private key; else ~/.ssh/id_*.")
@click.option("--agent", type=click.Path(path_type=Path), metavar="SOCKET", help="An SSH agent that has our key.")
@fingerprint_option
@click.pass_context
def add(
    ctx: click.Context,
    name: str,
    where: str,
    port: int,
    jump: str,
    identity: Path | None,
    agent: Path | None,
    expected: str | None,
) -> None:
    """Fetch the key of a host, have its fingerprint compared, and write [hosts.NAME] at the end of the settings file.

    \b
    Examples:
      autotuner hosts add gpu1 ops@10.0.0.7 --identity /etc/autotuner/id_ed25519
      autotuner hosts add gpu2 ops@gpu2 --jump gpu1 --fingerprint SHA256:uNiVztksCsDhcc0u9e8BrY8bSXBDSVrSJYh1Cf5Q0Zk
    """
    path, settings = open_settings(ctx)
    user, at, address = where.rpartition("@")
    if not at or not user:
        raise click.UsageError(f"say who to be there: USER@{where}")
    if not re.fullmatch(NAME_PATTERN, name):
        raise click.UsageError(f"{name!r} cannot be a host's name: letters, digits, _ and -")
    if name in settings.hosts:
        raise Refused(
            f"there is a host {name} already ({settings.hosts[name].described}); pin its key: hosts pin {name}"
        )
    key = _compared(settings, (address, port, jump), f"{user}@{address}", expected)
    if identity is None and agent is None:
        identity = _usual_key()
    lines = {"address": address, "port": port, "user": user, "host_key": key, "identity_file": identity, "agent": agent}
    shown = {k: str(v) if isinstance(v, Path) else v for k, v in {**lines, "jump": jump}.items() if v}
    block = "".join(f"{k} = {json.dumps(v)}\n" for k, v in shown.items())
    text = path.read_text(encoding="utf-8")
    _write(path, f"{text}{'' if text.endswith(chr(10)) else chr(10)}\n[hosts.{name}]\n{block}")
    click.echo(
        f'{path} has [hosts.{name}] now. Try it: autotuner hosts test {name}. A slot is put there by host = "{name}"; '
        "restart the daemon to take it over"
    )


@hosts.command("list")
@json_option
@click.pass_context
def list_(ctx: click.Context, as_json: bool) -> None:
    """Show the hosts of the settings: where they are, their pinned keys, their slots."""
    _, settings = open_settings(ctx)
    found = [_row(settings, name, host) for name, host in settings.hosts.items()]
    if as_json:
        print_json(found)
    elif not found:
        click.echo("no host but this machine; set one up: autotuner hosts add NAME USER@ADDRESS")
    else:
        cells = [
            (r["name"], r["where"], r["jump"] or "-", ", ".join(r["slots"]) or "-", ", ".join(r["keys"])) for r in found
        ]
        click.echo(table(cells, ("host", "where", "jump", "slots", "pinned key")))


@hosts.command("test")
@click.argument("name")
@json_option
@click.pass_context
def test(ctx: click.Context, name: str, as_json: bool) -> None:
    """Look at everything that a slot on a host needs: connection, key, Python, agent, disk, GPUs, ports, time.

    Nothing is started or stopped there; the agent is copied to the host's folder. Exit code 7 if something is not well.
    """
    _, settings = open_settings(ctx)
    checks = asyncio.run(_checks(settings, name))
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        for check in checks:
            click.echo(f"{'ok     ' if check.ok else 'NOT OK '} {check.what}: {check.said}")
    if not all(check.ok for check in checks):
        ctx.exit(HostError.exit_code)


@hosts.command("pin")
@click.argument("name")
@fingerprint_option
@click.pass_context
def pin(ctx: click.Context, name: str, expected: str | None) -> None:
    """Show the pinned and the present fingerprint of a host, and pin the present key once it was compared."""
    path, settings = open_settings(ctx)
    destination = settings.way_to(name)[-1][1]
    for old in destination.fingerprints:
        click.echo(f"pinned:  {old}")
    where = (destination.address, destination.port, destination.jump)
    key = _compared(settings, where, f"host {name}", expected)
    if key in destination.host_key:
        click.echo(f"host {name} shows the key that is pinned; nothing is changed")
        return
    _write(path, _with_key(path.read_text(encoding="utf-8"), path, name, key))
    click.echo(f"{path}: the key of host {name} is pinned. Restart the daemon to take it over; servers live on")


def _compared(settings: Settings, where: tuple[str, int, str], shown_as: str, expected: str | None) -> str:
    """Fetch the keys of a host and return the one to pin, compared by whoever knows. Raise Refused if none is."""
    keys = asyncio.run(_fetched(settings, *where))
    for key in keys:
        click.echo(f"present: {fingerprint(key)} ({key.split()[0]})")
    if expected is not None:
        found = next((key for key in keys if fingerprint(key) == expected.strip()), None)
        if found is None:
            raise Refused(f"{shown_as} does not show {expected}: nothing is pinned. Somebody else may answer there")
        return found
    click.echo("Compare it on the host itself: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub", err=True)
    if not click.confirm(f"Does {shown_as} itself say {fingerprint(keys[0])}?", err=True):
        raise Refused("nothing is pinned")
    return keys[0]


async def _fetched(settings: Settings, address: str, port: int, jump: str) -> tuple[str, ...]:
    from autotuner.edge import ssh

    before = await ssh.connect(settings.way_to(jump)) if jump else None
    try:
        return await ssh.fetch_keys(address, port, before)
    finally:
        if before is not None:
            before.abort()


def _usual_key() -> Path:
    for name in USUAL_KEYS:
        path = Path.home() / ".ssh" / name
        if path.is_file():
            return path
    raise NotFound("there is no key of ours in ~/.ssh: make one (ssh-keygen -t ed25519), or name it with --identity")


def _write(path: Path, text: str) -> None:
    """Replace the settings file by a text that is valid settings. Raise InvalidInput if it is not."""
    from autotuner.core.source import Source, validate
    from autotuner.edge.files import write_atomically

    validate(Settings, Source(str(path), text))
    write_atomically(path.resolve(), text.encode(), path.stat().st_mode & 0o777)


def _with_key(text: str, path: Path, name: str, key: str) -> str:
    """Replace the one line of a host's key, and nothing else. Raise Refused where that is no single line."""
    from autotuner.core.source import line_of, lines_of

    lines = text.split("\n")
    number = line_of(lines_of(text), ("hosts", name, "host_key")) or 0
    line = lines[number - 1] if 0 < number <= len(lines) else ""
    head, equals, value = line.partition("=")
    single = head.strip() == "host_key" and value.strip().startswith('"') and value.strip().endswith('"')
    if not equals or not single:
        raise Refused(
            f"{path} has the key of host {name} in a form of its own; write it there yourself: host_key = {key!r}"
        )
    lines[number - 1] = f"{head}= {json.dumps(key)}"
    return "\n".join(lines)


def _row(settings: Settings, name: str, host: Destination) -> dict[str, Any]:
    return {
        "name": name,
        "where": host.described,
        "jump": host.jump,
        "keys": list(host.fingerprints),
        "folder": host.folder,
        "slots": [slot for slot, own in settings.slots.items() if name in {node.host for node in own.members}],
    }


async def _checks(settings: Settings, name: str) -> list[Check]:
    """Look at a host step by step; without a connection there is only one step."""
    from autotuner.edge.host_ssh import SshHost, open_link

    way = settings.way_to(name)
    try:
        link = await open_link(way, "")
    except HostError as error:
        return [Check("connection", ok=False, said=str(error))]
    link.abort()
    with contextlib.closing(SshHost(way)) as host:
        facts = await host.facts()
        off_s = float(facts["time_s"]) - (clock.monotonic_s() + clock.realtime_ahead_s())
        in_time = abs(off_s) <= TIME_OFF_MAX_S
        free, least = await host.free_disk_mib(), settings.disk_free_min_mib
        checks = [
            Check("connection", ok=True, said=f"{way[-1][1].described} shows its pinned key and lets us in"),
            Check("python", ok=True, said=str(facts["python"])),
            Check("agent", ok=True, said=f"copied to {link.folder}, whole, and running"),
            Check("disk", free >= least, f"{free:,.0f} MiB free, {least} asked for (disk_free_min_mib)"),
            Check("time", in_time, f"{off_s:+.1f} s from ours" + ("" if in_time else ": set the clock of one of them")),
        ]
        checks.append(await _bench_check(host, name, way[-1][1].bench_python))
        for slot, own in settings.slots.items():
            for part in (own.on(rank) for rank, node in enumerate(own.members) if node.host == name):
                checks += await _slot_checks(host, slot, part)
        return checks


async def _bench_check(host: Any, name: str, python: str | None) -> Check:
    if python is None:
        advice = (
            f"a Python with pydantic there, named by [hosts.{name}] bench_python, drives the load on the host itself"
        )
        return Check(
            "benchmark", ok=True, said=f"through a forwarded port, so latencies hold the way there and back; {advice}"
        )
    try:
        state = await host.bench_state()
    except HostError as error:
        state = str(error)
    well = state in {"ready", "missing"}
    return Check("benchmark", well, f"on the host itself, with {python}" if well else state)


async def _slot_checks(host: Any, slot: str, own: Slot) -> list[Check]:
    port, gpus = own.port, own.gpus
    holder = await host.port_holder(port)
    failed = ""
    try:
        found = {use.index for use in await host.gpus(gpus)}
    except HostError as error:
        found, failed = set(), f": {error}"
    missing = [str(index) for index in gpus if index not in found]
    foreign = holder is not None and holder.launch_id is None
    shown = "is free" if holder is None else f"is held by {'ours, ' if holder.launch_id else ''}{holder.name}"
    checks = [
        Check(f"slot {slot}", not foreign, f"port {port} {shown}" + (": free it, or take another" if foreign else ""))
    ]
    try:
        await host.reach(own.place.host, port)
    except HostError as error:
        checks.append(Check(f"slot {slot}", ok=False, said=str(error)))
    if gpus:
        what = f"GPU {', '.join(map(str, sorted(found)))} seen" if found else f"no GPU seen{failed}"
        if len(found) > 1 and (how := await _joined(host, gpus)):
            what = f"{what}; {how}"
        advice = f"; {', '.join(missing)} missing: look at nvidia-smi there" if missing else ""
        checks.append(Check(f"slot {slot}", not missing, what + advice))
        why_not = (await host.readings(gpus)).why_no_gpus
        figures = (
            f"no figures of GPUs beside levels: {why_not}" if why_not else "figures of GPUs are read beside levels"
        )
        checks.append(Check(f"slot {slot}", ok=True, said=figures))
    return checks


async def _joined(host: Any, gpus: tuple[int, ...]) -> str:
    """How the slot's GPUs are joined there; empty where nvidia-smi does not say."""
    try:
        ran = await host.run(topology.QUERY, TOPOLOGY_TIMEOUT_S)
    except HostError:
        return ""
    return topology.joined(topology.parse(ran.output), gpus) if ran.code == 0 else ""
