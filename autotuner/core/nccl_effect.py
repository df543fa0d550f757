"""Where NCCL did not do what a candidate's variables ask for. Pure.

Owns the promise that a variant which NCCL never heard of, or did not follow, is not read as a finding about it.
"""

from collections.abc import Mapping

from autotuner.core.effective import Difference
from autotuner.core.nccl import Nccl
from autotuner.engines.nccl import SETTINGS, all_reduce_by, protocols, tuned


def differences(env: Mapping[str, str], nccl: Nccl) -> tuple[Difference, ...]:
    """Given a candidate's variables and what NCCL says, return where NCCL did not do what was asked for."""
    asked = tuned(env)
    if not asked or not nccl.spoke:
        return ()
    unheard = [_unheard(name, value, nccl) for name, value in asked.items() if SETTINGS[name].told]
    named = {difference.what for difference in unheard if difference is not None}
    heard = {name: value for name, value in asked.items() if name not in named}
    found = [*unheard, _algorithm(heard, nccl), _protocol(heard, nccl), _peers(asked, nccl), _channels(asked, nccl)]
    return tuple(difference for difference in found if difference is not None)


def _unheard(name: str, value: str, nccl: Nccl) -> Difference | None:
    told = nccl.settings.get(name)
    if told is None:
        why = "NCCL reports no such setting, so this variant is the server without it"
        advice = "check its spelling and value, and whether the engine hands its environment on"
        return Difference(name, value, "NCCL's own choice", why, advice)
    if told.lower() == value.lower():
        return None
    return Difference(name, value, told, "NCCL was told otherwise, by the engine or by its own nccl.conf")


def _algorithm(asked: Mapping[str, str], nccl: Nccl) -> Difference | None:
    """From 2.22 on NCCL connects what it uses: rings alone mean that no tree was asked to carry anything."""
    wanted = all_reduce_by(asked.get("NCCL_ALGO", ""))
    if not wanted:
        return None
    shown = asked["NCCL_ALGO"]
    used = {word.split()[0].lower() for word in nccl.chose}
    if used and not used & wanted:
        why = "all-reduces are carried by another algorithm than the one to be tried"
        return Difference("NCCL_ALGO", shown, ", ".join(nccl.chose), why)
    built = {"rings": "ring", "trees": "tree"}
    connected = {built[name] for name in nccl.connected if name in built}
    if len(wanted) == 1 and connected and wanted <= {"ring", "tree"} and not wanted & connected:
        why = "NCCL connected nothing for the algorithm to be tried, so it carries no all-reduce"
        return Difference("NCCL_ALGO", shown, " and ".join(nccl.connected), why)
    if wanted == {"nvls"} and nccl.nvls_channels == 0:
        return Difference("NCCL_ALGO", shown, "0 NVLS channels", "NCCL found no NVLink SHARP here")
    return None


def _protocol(asked: Mapping[str, str], nccl: Nccl) -> Difference | None:
    wanted = protocols(asked.get("NCCL_PROTO", ""))
    used = {word.split()[1].lower() for word in nccl.chose}
    if not wanted or not used or used & wanted:
        return None
    why = "all-reduces go by another protocol than the one to be tried"
    return Difference("NCCL_PROTO", asked["NCCL_PROTO"], ", ".join(nccl.chose), why)


def _peers(asked: Mapping[str, str], nccl: Nccl) -> Difference | None:
    peers = any(way.startswith("P2P") for way in nccl.transports)
    level = asked.get("NCCL_P2P_LEVEL", "").upper()
    off = asked.get("NCCL_P2P_DISABLE", "0") == "1" or level in {"LOC", "0"}
    shown = f"{level}" if level else "off"
    if off and peers:
        return Difference("peer-to-peer", "off", ", ".join(nccl.transports), "NCCL uses it all the same")
    if level and not off and nccl.links and not peers:
        why = "NCCL found no two GPUs that near, or may not let them talk directly"
        return Difference("peer-to-peer", f"up to {shown}", ", ".join(nccl.transports), why)
    return None


def _channels(asked: Mapping[str, str], nccl: Nccl) -> Difference | None:
    count = nccl.channels or 0
    least, most = asked.get("NCCL_MIN_NCHANNELS"), asked.get("NCCL_MAX_NCHANNELS")
    if least is not None and least.isdecimal() and count < int(least):
        return Difference("channels", f"{least} at least", str(count), "NCCL has fewer on this host")
    if most is not None and most.isdecimal() and count > int(most):
        return Difference("channels", f"{most} at most", str(count), "NCCL did not follow")
    return None
