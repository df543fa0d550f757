"""A slot over several hosts: its nodes, the ports and GPUs that it takes on each, and where its ranks meet. Pure.

One server is then as many processes as there are nodes, one on each, called ranks: rank 0 is on the first node, has the
slot's port and answers there. How an engine is told so is in `engines/nodes.py`.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from autotuner.core.source import Key, wrong_at
from autotuner.edge.destination import LOCAL, Destination, HostName

LOOPBACK = "127.0.0.1"
MEET_AHEAD = 1000  # the ranks meet at the slot's port and so many more, unless the settings name another
PORT_MAX = 65535
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Node(BaseModel):
    """One of the hosts of a slot over several: where, which GPUs of it, and variables for its rank alone.

    `env` is for what differs from host to host, such as NCCL_SOCKET_IFNAME; it wins over the candidate's own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: HostName = LOCAL
    gpus: tuple[int, ...] = ()
    env: dict[Variable, str] = Field(default_factory=dict)


class Taken(NamedTuple):
    """A port or a GPU that a slot has on a host, with the key of the settings that says so."""

    host: str
    number: int
    key: Key


def from_first_node(slot: Any) -> Any:
    """Given a slot as it was read, return it with the host and the GPUs of its first node, where it has nodes.

    Raise the error of a model's validator if it names its own beside them, or one node alone.
    """
    nodes = slot.get("nodes") if isinstance(slot, dict) else None
    if not isinstance(nodes, list | tuple) or not nodes:
        return slot
    if len(nodes) == 1:
        raise wrong_at(("nodes",), "has one node: a slot on one host names it with host and gpus instead")
    first = nodes[0].model_dump() if isinstance(nodes[0], Node) else nodes[0]
    if not isinstance(first, dict):
        return slot
    own = {"host": first.get("host", LOCAL), "gpus": first.get("gpus", ())}
    for key, value in own.items():
        if key in slot and slot[key] != value:
            raise wrong_at((key,), "belongs into each of the slot's nodes")
    return {**slot, **own}


def ports(nodes: tuple[Node, ...], port: int) -> tuple[int, ...]:
    """Given a slot's nodes and its port, return the port of each rank.

    It is the slot's on every host: SGLang's further ranks open one too, for health checks. Ranks that share a host count on.
    """
    return tuple(port + sum(other.host == node.host for other in nodes[:rank]) for rank, node in enumerate(nodes))


def meeting_port(port: int, named: int | None) -> int:
    """Given the slot's port and the one that the settings name, return the port at which its ranks meet."""
    return named or (port + MEET_AHEAD if port + MEET_AHEAD <= PORT_MAX else port - MEET_AHEAD)


def meeting_address(nodes: tuple[Node, ...], named: str | None, hosts: Mapping[str, Destination]) -> str | None:
    """Given a slot's nodes, return the address at which all reach the first; None where the settings must name it."""
    first = nodes[0].host
    if named is not None:
        return named
    if all(node.host == first for node in nodes):
        return LOOPBACK
    return hosts[first].address if first in hosts else None


def taken_ports(nodes: tuple[Node, ...], port: int, named: int | None) -> Iterator[Taken]:
    """Every port that a slot takes: that of each rank, and where they meet, if there are several."""
    for node, own in zip(nodes, ports(nodes, port), strict=True):
        yield Taken(node.host, own, ("port",))
    if len(nodes) > 1:
        yield Taken(nodes[0].host, meeting_port(port, named), ("port",) if named is None else ("dist_port",))


def taken_gpus(nodes: tuple[Node, ...]) -> Iterator[Taken]:
    """Every GPU that a slot takes, on each of its nodes."""
    for rank, node in enumerate(nodes):
        for gpu in node.gpus:
            yield Taken(node.host, gpu, ("gpus",) if len(nodes) == 1 else ("nodes", rank, "gpus"))
