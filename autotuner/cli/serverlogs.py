"""The log of a launch for people: from our own folder or the host; of several ranks as one, each line with its rank."""

import asyncio
import contextlib

from autotuner.cli.common import State
from autotuner.core.ranks import whole_logs
from autotuner.core.redact import plain, redact_text
from autotuner.edge import housekeeping
from autotuner.edge.destination import LOCAL
from autotuner.edge.host import Host, rank_id
from autotuner.edge.rows import LaunchRow
from autotuner.errors import NotFound
from autotuner.hosts import Hosts


def log_text(state: State, row: LaunchRow) -> str:
    """Given a launch, return its whole log, secrets hidden. Raise NotFound where there is none, HostError where it is away."""
    if row.slot not in state.settings.slots:
        raise NotFound(f"slot {row.slot}, in which it was launched, is not in the settings any more")
    nodes = state.settings.slots[row.slot].members
    pieces = asyncio.run(_pieces(state, row))
    if len(nodes) == 1:
        return _hidden(pieces[0])
    ordered = whole_logs([piece if piece.endswith(b"\n") else piece + b"\n" for piece in pieces])
    lines = [
        f"rank {rank} on {nodes[rank].host} | {line}"
        for rank, piece in ordered
        for line in _hidden(piece).removesuffix("\n").split("\n")
    ]
    return "\n".join(lines)


async def _pieces(state: State, row: LaunchRow) -> list[bytes]:
    """The log of each rank."""
    with contextlib.closing(Hosts(state.settings)) as hosts:
        found = []
        for rank, node in enumerate(state.settings.slots[row.slot].members):
            part = rank_id(row.id, rank)
            found.append(_here(state, part) if node.host == LOCAL else await _there(hosts.named(node.host), part))
        return found


def _here(state: State, part: str) -> bytes:
    path = state.settings.launches / part / housekeeping.LOG
    try:
        return housekeeping.read_log(path)
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from None


async def _there(host: Host, part: str) -> bytes:
    found = bytearray()
    while data := await host.read_log(part, len(found)):
        found += data
    return bytes(found)


def _hidden(data: bytes) -> str:
    text = data.replace(b"\0", b"").decode("utf-8", "replace")
    return plain(redact_text(text), len(text) + 1)
