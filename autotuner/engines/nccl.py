"""NCCL's variables as a family: what each takes and does, which values contradict each other or this host. Pure.

Sources: NVIDIA's NCCL user guide ("Environment Variables", docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html) and
its release notes (2.18.1: LL128 and the Tree algorithm on hosts with a NIC a GPU); for LL128 also the threads
github.com/NVIDIA/nccl/issues/740, 831, 1261 and 596. What NCCL does with a wrong value, which algorithms it refuses on one
host, that Tree for everything leaves no other collective, and that its lines of INIT, ENV and GRAPH end with the start and cost
a CUDA graph nothing (9.5 us an all-reduce of 8 KiB with them and without), was seen with 2.28.9 on two H200.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotuner.core.candidate import Candidate
from autotuner.core.source import nearest
from autotuner.core.topology import PATHS, Topology
from autotuner.engines.base import Diagnosis
from autotuner.engines.flags import Findings

ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
FUNCTIONS = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce")
_REDUCES = {"ring", "tree", "collnetdirect", "collnetchain", "nvls", "nvlstree"}  # what can carry an all-reduce
_SEVERAL_NODES = {"nvlstree", "collnetdirect", "collnetchain"}
_OFF = ("", "0")
# Lines of the start alone; TUNING would add one for each collective that runs outside of a CUDA graph.
WATCHING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH"}
_PARALLEL = (
    ("tp-size", "tp", "tensor-parallel-size"),
    ("pp-size", "pp", "pipeline-parallel-size"),
    ("dp-size", "dp", "data-parallel-size"),
    ("ep-size", "ep", "expert-parallel-size"),
)
_TROUBLE = re.compile(r"NCCL WARN (.*)|(Watchdog caught collective operation timeout)|(NCCL error)|(Init START)")
_FORMED = re.compile(r"Init COMPLETE")


@dataclass(frozen=True)
class Setting:
    """One variable: what it takes (empty: a whole number), what it does, and since which release of NCCL.

    `corrupts` names the value, lower case, with which answers may be wrong; `told` says that NCCL's ENV lines report it.
    """

    name: str
    does: str
    values: tuple[str, ...] = ()
    since: str = ""
    corrupts: str = ""
    told: bool = False
    listed: bool = False


SETTINGS = {
    row.name: row
    for row in (
        Setting("NCCL_ALGO", "which algorithms may carry a collective", ALGORITHMS, "2.5", told=True, listed=True),
        Setting("NCCL_PROTO", "which protocols may", PROTOCOLS, "2.5", corrupts="ll128", told=True, listed=True),
        Setting("NCCL_P2P_LEVEL", "how far apart GPUs may be for peer-to-peer", PATHS, "2.3.4", told=True),
        Setting("NCCL_P2P_DISABLE", "no peer-to-peer between GPUs", ("0", "1"), told=True),
        Setting("NCCL_P2P_DIRECT_DISABLE", "no direct access between GPUs of one process", ("0", "1"), "2.15"),
        Setting("NCCL_SHM_DISABLE", "no shared memory between GPUs", ("0", "1"), told=True),
        Setting("NCCL_NVLS_ENABLE", "sums in the NVSwitch (NVLink SHARP)", ("0", "1", "2"), "2.17", told=True),
        Setting("NCCL_CUMEM_ENABLE", "memory by the cuMem functions", ("0", "1", "-2"), "2.18"),
        Setting("NCCL_MIN_NCHANNELS", "at least so many channels", told=True),
        Setting("NCCL_MAX_NCHANNELS", "at most so many channels", told=True),
        Setting("NCCL_MIN_CTAS", "at least so many thread blocks", since="2.17"),
        Setting("NCCL_MAX_CTAS", "at most so many thread blocks", since="2.17"),
        Setting("NCCL_NTHREADS", "threads of a block", ("64", "128", "256", "512")),
        Setting("NCCL_BUFFSIZE", "bytes of a buffer between two GPUs"),
        Setting("NCCL_IGNORE_DISABLED_P2P", "goes on where peer-to-peer is switched off in the BIOS", ("0", "1", "2")),
        Setting("NCCL_GRAPH_MIXING_SUPPORT", "CUDA graphs beside collectives outside of one", ("0", "1"), "2.13"),
        Setting("NCCL_GRAPH_REGISTER", "registers buffers of CUDA graphs", ("0", "1"), "2.11"),
    )
}


def tuned(env: Mapping[str, str]) -> dict[str, str]:
    """Given a candidate's variables, return those that change how NCCL communicates."""
    return {name: value for name, value in env.items() if name in SETTINGS}


def ranks(candidate: Candidate) -> int | None:
    """Given a candidate, return how many GPUs it spreads over, 1 for none but its own; None where that is not told."""
    if candidate.engine not in {"sglang", "vllm"}:
        return None
    product = 1
    for names in _PARALLEL:
        asked = candidate.arg(*names)
        product *= asked if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0 else 1
    return product


def wants_topology(candidate: Candidate) -> bool:
    """Given a candidate, tell whether it matters to NCCL's variables how its GPUs are joined."""
    return bool(tuned(candidate.launch.env)) and ranks(candidate) != 1


def watching(candidate: Candidate) -> dict[str, str]:
    """Given a candidate, return the variables that make NCCL say what it chose; none where the operator set how it logs.

    Only where NCCL is varied and has something to do: its other servers run as they were written.
    """
    env = candidate.launch.env
    if not tuned(env) or ranks(candidate) == 1 or any(name.startswith("NCCL_DEBUG") for name in env):
        return {}
    return dict(WATCHING)


def corrupting(env: Mapping[str, str]) -> str:
    """Given a candidate's variables, return the setting with which answers may be wrong, empty if there is none.

    LL128 may be forced where a store of 128 bytes can be torn; what NCCL chooses by itself, and what `^` excludes, is safe.
    """
    for name, row in SETTINGS.items():
        if not row.corrupts or name not in env:
            continue
        if any(row.corrupts in names for _, excludes, names in _entries(env[name]) if not excludes):
            return f"{name} = {env[name]}"
    return ""


def all_reduce_by(value: str) -> set[str]:
    """Given a value of NCCL_ALGO, return the algorithms that it leaves to an all-reduce, lower case; empty for no value."""
    return _allowed(value, "allreduce", ALGORITHMS) & _REDUCES if value else set()


def protocols(value: str) -> set[str]:
    """Given a value of NCCL_PROTO, return the protocols that it leaves to an all-reduce, lower case; empty for no value."""
    return _allowed(value, "allreduce", PROTOCOLS) if value else set()


def unchecked(candidate: Candidate, answers_agree_min: float) -> tuple[str, ...]:
    """Given a candidate and the least agreement of answers that its slot asks for, return why it may not be tried.

    Refused rather than measured and never promoted: hours of GPU time for a result that cannot be used serve nobody.
    """
    risk = corrupting(candidate.launch.env)
    if not risk or answers_agree_min > 0:
        return ()
    said = (
        f"env.{risk} can corrupt answers, and this slot compares none: set constraints.answers_agree_min of its objective "
        "(0.25 is the default), or leave LL128 to NCCL"
    )
    return (said,)


def check(candidate: Candidate, topology: Topology | None = None, gpus: tuple[int, ...] = ()) -> Findings:
    """Given a candidate, how the host's GPUs are joined and which are its own, return what its NCCL variables come to.

    What NCCL would refuse, ignore, or do without any effect is a problem: measuring it would measure noise or nothing.
    """
    env = tuned(candidate.launch.env)
    if not env:
        return Findings()
    if ranks(candidate) == 1:
        named = ", ".join(f"env.{name}" for name in env)
        return Findings((f"{named}: no effect on one GPU, there is nothing to communicate; take it out, or raise tp",))
    wrong = [said for name, value in env.items() if (said := _wrong_value(name, value))]
    if wrong:
        return Findings(tuple(wrong))
    problems = [*_contradictions(env), *_algorithms(candidate, env)]
    warnings = _left_out(env)
    if topology is not None:
        problems += _unable(env, topology, gpus)
        warnings += _same_anyway(env, topology, gpus)
    if _on(env, "NCCL_P2P_DISABLE") and _on(env, "NCCL_SHM_DISABLE"):
        warnings.append(
            "env.NCCL_P2P_DISABLE, env.NCCL_SHM_DISABLE: with both, GPUs of one host talk over its network, some hundred "
            "times slower; leave one of them out"
        )
    if (risk := corrupting(env)) and not problems:
        warnings.append(
            f"env.{risk}: LL128 corrupts data where NCCL would not choose it by itself; its answers are compared with the "
            "best-known's, and it is never promoted without"
        )
    return Findings(tuple(problems), tuple(warnings))


def blame(diagnosis: Diagnosis, candidate: Candidate, lines: tuple[str, ...], *, hangs: bool = False) -> Diagnosis:
    """Given why a server hung or died, return it with NCCL named where the candidate varies it and its log points there.

    A serving server that `hangs` without a word is most likely waiting for NCCL too: its time-out comes minutes later.
    """
    env = tuned(candidate.launch.env)
    trouble = _trouble(lines)
    if not env or not (trouble or hangs) or ranks(candidate) == 1:
        return diagnosis
    values = ", ".join(f"{name} = {value}" for name, value in env.items())
    why = f"{trouble}, and this candidate sets" if trouble else "its log does not say why, but this candidate sets"
    first = f"try it without {next(iter(env))} first" if len(env) == 1 else "take the variables out one by one"
    advice = f"{first}; {diagnosis.advice}" if diagnosis.advice else first
    return replace(diagnosis, sentence=f"{diagnosis.sentence}; {why} {values}", advice=advice)


def _trouble(lines: tuple[str, ...]) -> str:
    """What the last lines say of NCCL: its own warning first, then a time-out, then a communicator that never formed."""
    found = [match for line in lines if (match := _TROUBLE.search(line))]
    warned = next((match.group(1).strip() for match in found if match.group(1)), "")
    if warned:
        return f"NCCL warns: {warned[:160].rstrip('.')}"
    if any(match.group(2) for match in found):
        return "a collective operation of NCCL timed out"
    if any(match.group(3) for match in found):
        return "NCCL failed"
    started = sum(1 for match in found if match.group(4))
    formed = sum(1 for line in lines if _FORMED.search(line))
    return "NCCL's ranks began to connect and never did" if started > formed else ""


def _entries(value: str) -> list[tuple[str, bool, tuple[str, ...]]]:
    """A list as NCCL reads it, lower case: function ("" for all), whether it excludes, and the names.

    `allreduce:tree,ring;broadcast:ring`, `^ll128`.
    """
    found = []
    for entry in value.lower().split(";"):
        before, colon, after = entry.partition(":")
        names = after if colon else before
        excludes = names.startswith("^")
        words = tuple(word.strip() for word in names.removeprefix("^").split(",") if word.strip())
        found.append((before.strip() if colon else "", excludes, words))
    return found


def _wrong_value(name: str, value: str) -> str:
    row = SETTINGS[name]
    if not row.values:
        return "" if value.isdecimal() else f"env.{name} = {value!r} is no whole number"
    known = {word.lower(): word for word in row.values}
    if not row.listed:
        digits = name == "NCCL_P2P_LEVEL" and value.isdecimal()  # the path types had numbers once, and still have
        if value.lower() in known or digits:
            return ""
        ignored = "NCCL ignores it without a word" if name == "NCCL_P2P_LEVEL" else "NCCL does not take it"
        hint = _hint(value.lower(), row.values)
        takes = "" if hint.startswith("known") else f" It takes {', '.join(row.values)}"
        return f"env.{name} = {value!r} is no value of it, {ignored}: {hint}{takes}"
    for number, (function, _, words) in enumerate(_entries(value)):
        if function and function not in {f.lower() for f in FUNCTIONS}:
            return f"env.{name} = {value!r}: NCCL has no function {function!r}: {_hint(function, FUNCTIONS)}"
        if number and not function:
            return f"env.{name} = {value!r}: every entry but the first needs a function, as in allreduce:tree"
        bad = [word for word in words if word not in known]
        if bad or not words:
            word = bad[0] if bad else ""
            return f"env.{name} = {value!r}: NCCL knows no {word!r} and ends the server: {_hint(word, row.values)}"
    return ""


def _hint(word: str, known: tuple[str, ...]) -> str:
    """The right word in the spelling of the table, whatever the case of the wrong one."""
    plain = {name.lower(): name for name in known}
    hint = nearest(word, list(plain))
    near = re.fullmatch(r"did you mean (.*)\?", hint)
    return f"did you mean {plain[near.group(1)]}?" if near else f"known: {', '.join(known)}"


def _on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "") not in _OFF


def _contradictions(env: Mapping[str, str]) -> list[str]:
    found = []
    level = env.get("NCCL_P2P_LEVEL", "").upper()
    if _on(env, "NCCL_P2P_DISABLE") and level not in {"", "LOC", "0"}:
        found.append(
            f"env.NCCL_P2P_LEVEL = {level}: env.NCCL_P2P_DISABLE = 1 switches off what it would allow; this is the variant "
            "with NCCL_P2P_DISABLE alone, so keep one of them"
        )
    for least, most in (("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"), ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS")):
        if least in env and most in env and int(env[least]) > int(env[most]):
            found.append(f"env.{least} = {env[least]} is more than env.{most} = {env[most]}")
    return found


def _algorithms(candidate: Candidate, env: Mapping[str, str]) -> list[str]:
    """Algorithms that cannot carry this server's all-reduce: NCCL then ends the server at its first collective."""
    allowed = _allowed(env.get("NCCL_ALGO", ""), "allreduce", ALGORITHMS)
    if "NCCL_ALGO" not in env:
        return []
    able = allowed & _REDUCES
    nodes = candidate.arg("nnodes")
    if not (isinstance(nodes, int) and nodes > 1):
        able -= _SEVERAL_NODES
    said = f"env.NCCL_ALGO = {env['NCCL_ALGO']}"
    if not able:
        why = "on one node" if allowed & _REDUCES else "at all"
        return [
            f"{said}: none of these carries an all-reduce {why}, and NCCL ends the server at the first one; add Ring"
        ]
    if able <= {"nvls"} and not _nvls(candidate, env):
        how = (
            "set args.enable-nccl-nvls = true" if candidate.engine == "sglang" else "take env.NCCL_NVLS_ENABLE = 0 out"
        )
        return [f"{said}: NVLink SHARP is switched off, so that nothing is left for an all-reduce; {how}, or add Ring"]
    return []


def _left_out(env: Mapping[str, str]) -> list[str]:
    """What servers communicate beside all-reduces: older releases kept Ring for it, whatever was set; 2.28.9 does not."""
    value = env.get("NCCL_ALGO", "")
    missing = [function for function in ("AllGather", "Broadcast") if value and not _carriers(value, function)]
    if not missing:
        return []
    said = f"env.NCCL_ALGO = {value}: it leaves nothing for {' and '.join(missing)}, which servers use too"
    alone = "" if ":" in value else f"write allreduce:{value.lower()}, or "
    return [f"{said}, and newer releases of NCCL (2.28 was seen) end the server there; {alone}add Ring"]


def _carriers(value: str, function: str) -> set[str]:
    """What may carry another function than an all-reduce: Tree does none of them, PAT no broadcast, NVLS no broadcast."""
    able = {"ring", "nvls", "pat", "collnetdirect"} if function == "AllGather" else {"ring"}
    return _allowed(value, function.lower(), ALGORITHMS) & able


def _allowed(value: str, function: str, names: tuple[str, ...]) -> set[str]:
    """Which names a list leaves to a function, lower case: an entry for it stands for itself, else the one for all."""
    every = {name.lower() for name in names}
    allowed = every
    for wanted, excludes, words in _entries(value):
        if wanted in {"", function}:
            allowed = every - set(words) if excludes else set(words)
    return allowed


def _nvls(candidate: Candidate, env: Mapping[str, str]) -> bool:
    """SGLang switches NVLS off unless it is told otherwise."""
    if "NCCL_NVLS_ENABLE" in env:
        return _on(env, "NCCL_NVLS_ENABLE")
    return candidate.engine != "sglang" or candidate.arg("enable-nccl-nvls") is True


def _unable(env: Mapping[str, str], topology: Topology, gpus: tuple[int, ...]) -> list[str]:
    """What these GPUs cannot do, whatever is set."""
    if topology.nvlink(gpus) is not False:
        return []
    found = []
    if "NCCL_ALGO" in env and _allowed(env["NCCL_ALGO"], "allreduce", ALGORITHMS) <= {"nvls", "nvlstree"}:
        found.append(
            f"env.NCCL_ALGO = {env['NCCL_ALGO']} needs an NVSwitch, and not all of these GPUs are joined by NVLink"
        )
    if risk := corrupting(env):
        found.append(
            f"env.{risk} can corrupt answers here: LL128 is made for NVLink, and not all of these GPUs are joined by it; "
            "write Simple or LL"
        )
    if _on(env, "NCCL_NVLS_ENABLE") and "NVL" not in topology.paths(gpus):
        found.append("env.NCCL_NVLS_ENABLE: no effect, for none of these GPUs are joined by NVLink; take it out")
    return found


def _same_anyway(env: Mapping[str, str], topology: Topology, gpus: tuple[int, ...]) -> list[str]:
    """A peer-to-peer level that another one stands for on this host: what is measured twice is noise."""
    level = env.get("NCCL_P2P_LEVEL", "").upper()
    paths = {PATHS.index(path) for path in topology.paths(gpus)}
    if level not in PATHS or not paths:
        return []
    reach = PATHS.index(level)
    said = f"env.NCCL_P2P_LEVEL = {level}"
    if level == "LOC" or reach < min(paths):
        return [
            f"{said}: no two of these GPUs are so near, so that peer-to-peer is off; it is the same as NCCL_P2P_DISABLE = 1"
        ]
    if paths == {PATHS.index("NVL")}:
        return [f"{said}: all of these GPUs are joined by NVLink, so it allows what is done anyway; leave it out"]
    if reach > max(paths):
        return [f"{said}: no two of these GPUs are farther apart than {PATHS[max(paths)]}, so it is the same as that"]
    return []
