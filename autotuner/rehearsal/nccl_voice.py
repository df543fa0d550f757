"""NCCL's lines in the log of a rehearsed server of several GPUs, as release 2.28.9 was recorded on two H200. Pure.

Shortened to what differs: one line for each link and not one for each channel of it.
"""

from collections.abc import Mapping

from autotuner.engines import nccl

CHANNELS = {"P2P/CUMEM": 24, "SHM/direct/direct": 4, "NET/Socket/0": 2}
_REPORTED = tuple(name for name, row in nccl.SETTINGS.items() if row.told)
WATCHDOG = (
    "[rank0]:[E1130 09:27:44.739049466 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=2048, NumelOut=2048, Timeout(ms)=10000) ran for 10015 milliseconds before "
    "timing out.\n"
)


def begins(ranks: int, env: Mapping[str, str]) -> str:
    """Given the number of GPUs and the environment, return what NCCL prints until its ranks meet; empty where it is silent."""
    if not _speaks(ranks, env):
        return ""
    return "".join(
        [
            _line(0, "NCCL version 2.28.9+cuda13.0"),
            _line(0, "NET/Socket : Using [0]eth0:192.0.2.2<0>"),
            _line(0, "Using network Socket"),
            *(_line(rank, _init(rank, ranks, "START")) for rank in range(ranks)),
        ]
    )


def formed(ranks: int, env: Mapping[str, str]) -> str:
    """Given the same, return what NCCL prints once they have met: what was set, its channels, its links."""
    if not _speaks(ranks, env):
        return ""
    way = _way(env)
    channels = _channels(way, env)
    lines = [
        _line(0, f"{name} set by environment to {env[name]}")
        for name in _REPORTED
        if name in env and _is_read(name, env)
    ]
    lines += [
        _line(
            rank,
            f"{channels} coll channels, {channels} collnet channels, 0 nvls channels, 32 p2p channels, "
            "32 p2p channels per peer",
        )
        for rank in range(ranks)
    ]
    lines += [_line(rank, _init(rank, ranks, "COMPLETE")) for rank in range(ranks)]
    if fails(ranks, env):
        said = "no algorithm/protocol available for function AllReduce with datatype ncclBfloat16. NCCL_ALGO was set to"
        where = "[2026-11-30 09:27:14] vm:1530:1530 [0] enqueue.cc:1859"
        return "".join([*lines, f"{where} NCCL WARN Error : {said} {env['NCCL_ALGO']}.\n"])
    for rank in range(ranks):
        after = (rank + 1) % ranks
        lines.append(_line(rank, f"Channel 00/0 : {rank}[{rank}] -> {after}[{after}] via {way}"))
    trees = nccl.all_reduce_by(env.get("NCCL_ALGO", "")) == {"tree"}
    lines.append(_line(0, "Connected all trees" if trees else "Connected all rings, use ring PXN 0 GDR 1"))
    return "".join(lines)


def fails(ranks: int, env: Mapping[str, str]) -> bool:
    """Given the same, tell whether NCCL has nothing left for an all-reduce; the server then ends at its first one."""
    value = env.get("NCCL_ALGO", "")
    return ranks > 1 and bool(value) and not nccl.all_reduce_by(value) & {"ring", "tree"}


def _speaks(ranks: int, env: Mapping[str, str]) -> bool:
    return ranks > 1 and env.get("NCCL_DEBUG", "").upper() in {"INFO", "TRACE"}


def _way(env: Mapping[str, str]) -> str:
    """Over NVLink, unless it is switched off: then by shared memory, and without that over the network."""
    off = env.get("NCCL_P2P_DISABLE") == "1" or env.get("NCCL_P2P_LEVEL", "").upper() in {"LOC", "0"}
    if not off:
        return "P2P/CUMEM"
    return "NET/Socket/0" if env.get("NCCL_SHM_DISABLE") == "1" else "SHM/direct/direct"


def _channels(way: str, env: Mapping[str, str]) -> int:
    least, most = (
        int(env.get(name, default)) for name, default in (("NCCL_MIN_NCHANNELS", "0"), ("NCCL_MAX_NCHANNELS", "32"))
    )
    return min(max(CHANNELS[way], least), most)


def _is_read(name: str, env: Mapping[str, str]) -> bool:
    """A level that NCCL does not know is passed over without a word."""
    return name != "NCCL_P2P_LEVEL" or env[name].upper() in nccl.SETTINGS[name].values or env[name].isdecimal()


def _init(rank: int, ranks: int, state: str) -> str:
    return (
        f"ncclCommInitRankConfig comm 0x28176480 rank {rank} nranks {ranks} cudaDev {rank} nvmlDev {rank} "
        f"busId {60 + 10 * rank} commId 0xd91407143da2154f - Init {state}"
    )


def _line(rank: int, text: str) -> str:
    return f"vm:{986 + rank}:{986 + rank} [{rank}] NCCL INFO {text}\n"
