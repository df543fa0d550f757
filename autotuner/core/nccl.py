"""What NCCL chose in a launch, gathered from its own lines, and which of a candidate's variables that stands for. Pure."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autotuner.engines.base import NcclSaid

_WAYS = {
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
}  # they decide over which links ranks talk, and nothing else
_SETTINGS_MAX = 100
_LINKS_MAX = 4096  # pairs of ranks; a log may say anything
_LISTED_MAX = 8  # warnings and choices kept; NCCL may say the same thousands of times


@dataclass(frozen=True)
class Nccl:
    """What a launch's log says of NCCL; empty where it says nothing.

    `links` maps pairs of ranks ("0->1") to how they talk ("P2P/CUMEM"), `settings` are the variables that NCCL itself says were
    set, `connected` what it built ("rings", "trees": from 2.22 on only what is used), `chose` algorithm and protocol of
    all-reduces, where the operator has it tell. `added` says that autotuner made it talk.
    """

    version: str = ""
    channels: int | None = None
    nvls_channels: int | None = None
    links: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    connected: tuple[str, ...] = ()
    chose: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    added: bool = False

    @property
    def spoke(self) -> bool:
        """Whether it told how it set up its communication, so that what it does not name was not set."""
        return bool(self.version) and self.channels is not None

    @property
    def transports(self) -> tuple[str, ...]:
        """The ways on which its ranks talk."""
        return tuple(sorted(set(self.links.values())))

    def __str__(self) -> str:
        """One sentence."""
        ways = [f"{way} on {list(self.links.values()).count(way)} links" for way in self.transports]
        channels = f"{self.channels} channels" if self.channels is not None else ""
        nvls = f"{self.nvls_channels} NVLS channels" if self.nvls_channels else ""
        parts = [f"NCCL {self.version}", channels, nvls, " and ".join(ways), " and ".join(self.connected)]
        chose = f"all-reduces by {', '.join(self.chose)}" if self.chose else ""
        said = ", ".join(part for part in (*parts, chose) if part)
        warned = f"; it warns: {self.warned[0]}" if self.warned else ""
        how = "; autotuner set NCCL_DEBUG=INFO for INIT, ENV and GRAPH to know, which prints at the start alone"
        return f"{said}{warned}{how if self.added else ''}"


def absorb(nccl: Nccl, said: Iterable[NcclSaid]) -> Nccl:
    """Given what is known and new lines' facts, return both in one. Ranks and communicators repeat each other."""
    for fact in said:
        values = fact.values
        if fact.what == "version":
            nccl = replace(nccl, version=values[0])
        elif fact.what == "set" and len(nccl.settings) < _SETTINGS_MAX:
            nccl = replace(nccl, settings={**nccl.settings, values[0]: values[1]})
        elif fact.what == "link" and len(nccl.links) < _LINKS_MAX:
            nccl = replace(nccl, links={**nccl.links, f"{values[0]}->{values[1]}": values[2]})
        elif fact.what == "channels":
            nvls = int(values[1]) if len(values) > 1 else None
            nccl = replace(nccl, channels=int(values[0]), nvls_channels=nvls)
        elif fact.what == "connected":
            nccl = replace(nccl, connected=_with(nccl.connected, values[0].lower()))
        elif fact.what == "chose":
            nccl = replace(nccl, chose=_with(nccl.chose, f"{values[1]} {values[2]}"))
        elif fact.what == "warned":
            nccl = replace(nccl, warned=_with(nccl.warned, values[0]))
    return nccl


def stands_for(env: Mapping[str, str], nccl: Nccl | None) -> tuple[dict[str, str], str]:
    """Given a candidate's variables and what NCCL says, return those that count as written, and a digest of the rest's effect.

    What only decides over which links ranks talk counts by those links, where NCCL names them; so two levels of
    peer-to-peer that come to the same on a host are one server.
    """
    if nccl is None or not nccl.spoke or not nccl.links:
        return dict(env), ""
    written = {name: value for name, value in env.items() if name not in _WAYS}
    if len(written) == len(env):
        return written, ""
    body = [nccl.channels, nccl.nvls_channels, sorted(nccl.links.items()), sorted(nccl.connected)]
    return written, hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16]


def _with(known: tuple[str, ...], new: str) -> tuple[str, ...]:
    return known if new in known or len(known) >= _LISTED_MAX else (*known, new)
