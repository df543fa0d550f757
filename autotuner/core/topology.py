"""How the GPUs of a host are joined, as `nvidia-smi topo -m` shows it: the matrix taken apart, and said in one sentence. Pure.

The words are nvidia-smi's own: `NV18` is eighteen bonded NVLinks, PIX one PCIe bridge at most, PXB several, PHB the host
bridge of a CPU, NODE several host bridges of one NUMA node, SYS the link between NUMA nodes.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

QUERY = ("nvidia-smi", "topo", "-m")

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")
_GPU = re.compile(r"GPU(\d+)")
# The path types of NCCL_P2P_LEVEL, nearest first; NODE has no name of its own there and counts as PHB does.
PATHS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
_BY = {
    "NVL": "NVLink",
    "PIX": "PCIe through one bridge",
    "PXB": "PCIe through several bridges",
    "PHB": "PCIe through the host bridge",
    "NODE": "PCIe through several host bridges of one NUMA node",
    "SYS": "PCIe and the link between NUMA nodes",
}


@dataclass(frozen=True)
class Topology:
    """How GPUs are joined: `links` by pair ("0-1": "NV18"), and what nvidia-smi says of each GPU's CPUs and NUMA node.

    `nics` are the devices of its own legend, by name ("NIC0": "mlx5_0"), `nic_links` how near they are ("0-NIC0": "PIX").
    """

    links: dict[str, str]
    cpus: dict[int, str] = field(default_factory=dict)
    numa: dict[int, str] = field(default_factory=dict)
    nics: dict[str, str] = field(default_factory=dict)
    nic_links: dict[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs that are joined to another."""
        return tuple(sorted({int(index) for pair in self.links for index in pair.split("-")}))

    def among(self, gpus: Iterable[int] = ()) -> dict[str, str]:
        """The links among these GPUs; among all, if none is named."""
        wanted = set(gpus) or set(self.gpus)
        return {pair: link for pair, link in self.links.items() if set(map(int, pair.split("-"))) <= wanted}

    def paths(self, gpus: Iterable[int] = ()) -> frozenset[str]:
        """The path types that NCCL would see among these GPUs."""
        return frozenset(path(link) for link in self.among(gpus).values())

    def nvlink(self, gpus: Iterable[int] = ()) -> bool | None:
        """Whether all of these GPUs are joined by NVLink; None where nothing is known of any two of them."""
        paths = self.paths(gpus)
        return paths == {"NVL"} if paths else None


def path(link: str) -> str:
    """Given nvidia-smi's word for a link, return NCCL's for the same path."""
    return "NVL" if link.startswith("NV") else "PHB" if link == "NODE" else link


def parse(text: str) -> Topology | None:
    """Given what `nvidia-smi topo -m` prints, return it; None where it shows no two GPUs, or is no such text."""
    text = _ESCAPE.sub("", text)
    table = [[cell.strip() for cell in line.split("\t")] for line in text.splitlines() if "\t" in line]
    columns = next((row[1:] for row in table if not row[0] and _GPU.fullmatch(row[1])), None)
    if columns is None:
        return None
    links: dict[str, str] = {}
    cpus: dict[int, str] = {}
    numa: dict[int, str] = {}
    near: dict[str, str] = {}
    for first, *cells in table:
        found = _GPU.fullmatch(first)
        if found is None:
            continue
        gpu = int(found.group(1))
        for name, cell in zip(columns, cells, strict=False):
            other = _GPU.fullmatch(name)
            if _LINK.fullmatch(cell) and other is not None and gpu < int(other.group(1)):
                links[f"{gpu}-{int(other.group(1))}"] = cell
            elif _LINK.fullmatch(cell) and other is None:
                near[f"{gpu}-{name}"] = cell
            elif name == "CPU Affinity" and cell:
                cpus[gpu] = cell
            elif name == "NUMA Affinity" and cell:
                numa[gpu] = cell
    nics = dict(re.findall(r"^\s*(NIC\d+): (\S+)", text, re.MULTILINE))
    return Topology(links, cpus, numa, nics, near) if links else None


def joined(topology: Topology | None, gpus: Iterable[int] = ()) -> str:
    """Given a topology and GPUs (all, if none is named), say in one sentence how they are joined; empty if unknown.

    `GPUs 0-3 joined by NVLink (NV18)`; where pairs differ, each kind of link is named with its pairs.
    """
    links = topology.among(gpus) if topology is not None else {}
    if not links:
        return ""
    kinds: dict[str, list[str]] = {}
    for pair, link in links.items():
        kinds.setdefault(link, []).append(pair)
    who = _ranges(sorted({int(index) for pair in links for index in pair.split("-")}))
    if len(kinds) == 1:
        return f"GPUs {who} joined by {_said(next(iter(kinds)))}"
    parts = [f"{_said(link)} in {_pairs(pairs)}" for link, pairs in sorted(kinds.items(), key=_nearest_first)]
    return f"GPUs {who} joined by {', '.join(parts)}"


def _nearest_first(kind: tuple[str, list[str]]) -> tuple[int, str]:
    return PATHS.index(path(kind[0])), kind[0]


def _said(link: str) -> str:
    return f"{_BY['NVL' if link.startswith('NV') else link]} ({link})"


def _pairs(pairs: list[str]) -> str:
    return f"{len(pairs)} pairs" if len(pairs) > 3 else " and ".join(pairs)


def _ranges(indices: list[int]) -> str:
    """`0-3, 6` for 0, 1, 2, 3 and 6."""
    parts = []
    for _, group in itertools.groupby(enumerate(indices), lambda at: at[1] - at[0]):
        run = [index for _, index in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" if len(run) > 2 else f"{run[0]}, {run[1]}")
    return ", ".join(parts)
