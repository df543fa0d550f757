"""GPU memory and processes from nvidia-smi: the words to ask, and its answer taken apart."""

import math
import re

from autotuner.edge.host import GpuUse, Ran

MEMORY_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.used,memory.total", "--format=csv,noheader,nounits")
PROCESS_QUERY = (
    "nvidia-smi",
    "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
    "--format=csv,noheader,nounits",
)
NVLINK_QUERY = ("nvidia-smi", "nvlink", "--status")


def has_nvlink(status: str) -> bool:
    """Given what `nvidia-smi nvlink --status` prints, tell whether any link is up: `Link 0: 26.562 GB/s`."""
    return any(float(rate) > 0 for rate in re.findall(r"Link \d+: ([\d.]*\d) GB/s", status))


def failed(ran: Ran) -> str:
    """Given an nvidia-smi that failed, say so with its last words."""
    last = ran.output.strip().splitlines()[-1:] or ["it says nothing"]
    return f"nvidia-smi failed with exit code {ran.code}: {last[0][:200]}"


def parse(memory: str, processes: str, indices: tuple[int, ...]) -> tuple[GpuUse, ...]:
    """Given the answers to both queries and the wanted GPUs, return their use; lines that make no sense are left out."""
    by_uuid: dict[str, list[tuple[int, str, float]]] = {}
    for line in processes.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) >= 4 and fields[1].isdecimal():
            # nvidia-smi quotes nothing: what is between the second field and the last is the name, commas and all.
            name = ",".join(line.split(",")[2:-1]).strip()
            by_uuid.setdefault(fields[0], []).append((int(fields[1]), name, _number(fields[-1])))
    found = []
    for line in memory.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdecimal() and int(fields[0]) in indices:
            own = tuple(by_uuid.get(fields[1], ()))
            found.append(GpuUse(int(fields[0]), _number(fields[2]), _number(fields[3]), own))
    return tuple(found)


def _number(text: str) -> float:
    """Drivers write `[N/A]` where a container hides the figure."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
