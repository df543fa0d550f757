"""How GPUs are joined is read out of nvidia-smi's matrix as it was recorded, and said in one sentence."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotuner.core.topology import Topology, joined, parse, path

RECORDED = (Path(__file__).parent / "data" / "topo-2-h200.txt").read_text()
# As on a host of four PCIe GPUs in two sockets, with a network card in the first.
PCIE = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPIX\tSYS\tSYS\tPHB\t0-31,64-95\t0\t\tN/A
GPU1\tPIX\t X \tSYS\tSYS\tPHB\t0-31,64-95\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNODE\tSYS\t32-63,96-127\t1\t\tN/A
GPU3\tSYS\tSYS\tNODE\t X \tSYS\t32-63,96-127\t1\t\tN/A
NIC0\tPHB\tPHB\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)

NIC Legend:

  NIC0: mlx5_0
"""


def test_the_recorded_matrix_is_read_through_its_escapes() -> None:
    found = parse(RECORDED)
    assert found == Topology({"0-1": "NV18"}, {0: "0-31", 1: "0-31"}, {0: "0", 1: "0"})
    assert joined(found) == "GPUs 0, 1 joined by NVLink (NV18)"
    assert found is not None
    assert found.nvlink() is True


def test_pcie_numa_and_network_cards_are_told_apart() -> None:
    found = parse(PCIE)
    assert found is not None
    assert found.links["0-1"] == "PIX"
    assert found.links["2-3"] == "NODE"
    assert [found.links[pair] for pair in ("0-2", "0-3", "1-2", "1-3")] == ["SYS"] * 4
    assert (found.numa[2], found.cpus[2]) == ("1", "32-63,96-127")
    assert (found.nics, found.nic_links["0-NIC0"]) == ({"NIC0": "mlx5_0"}, "PHB")
    assert found.nvlink() is False
    assert found.paths() == {"PIX", "PHB", "SYS"}, "NCCL has no word of its own for NODE"
    assert joined(found) == (
        "GPUs 0-3 joined by PCIe through one bridge (PIX) in 0-1, PCIe through several host bridges of one NUMA node (NODE) "
        "in 2-3, PCIe and the link between NUMA nodes (SYS) in 4 pairs"
    )


def test_what_a_slot_does_not_have_does_not_count() -> None:
    found = parse(PCIE)
    assert joined(found, (0, 1)) == "GPUs 0, 1 joined by PCIe through one bridge (PIX)"
    assert joined(found, (3,)) == ""
    assert found is not None
    assert found.nvlink((3,)) is None


@pytest.mark.parametrize(
    "text",
    ["", "\n\t\n", "NVIDIA-SMI has failed because it couldn't communicate with the driver\n", "\tGPU0\nGPU0\t X \n"],
)
def test_without_two_gpus_there_is_nothing_and_no_fuss(text: str) -> None:
    assert parse(text) is None
    assert joined(parse(text)) == ""


@given(st.text() | st.text(alphabet="GPUNIC012\t \nXSYPHB"))
def test_no_text_is_too_odd(text: str) -> None:
    found = parse(text)
    assert joined(found) == "" or found is not None


@pytest.mark.parametrize(("link", "nccl"), [("NV4", "NVL"), ("NODE", "PHB"), ("PXB", "PXB")])
def test_links_have_nccls_names(link: str, nccl: str) -> None:
    assert path(link) == nccl
