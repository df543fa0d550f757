"""What NCCL says of itself in a server's log (NCCL_DEBUG=INFO), line by line. Pure.

Lines as 2.28.9 wrote them on two H200, and as older releases do: `host:pid:tid [gpu] NCCL INFO ...`, warnings with a time and a
source file in front.
"""

import re

from autotuner.engines.base import NcclSaid, Note

_INFO = re.compile(r"NCCL (?:INFO|WARN) ")
_WARN = re.compile(r"NCCL WARN (.{1,300})")
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("version", re.compile(r"NCCL version (\d+(?:\.\d+)+)")),
    ("set", re.compile(r"(NCCL_[A-Z0-9_]{1,40}) set by environment to (.{1,200}?)\.?$")),
    (
        "link",
        re.compile(
            r"Channel \d{1,4}(?:/\d{1,4})? : (\d{1,6})\[\w{1,20}\] -> (\d{1,6})\[\w{1,20}\].{0,20}? via (\S.{0,60})$"
        ),
    ),
    ("channels", re.compile(r"\b(\d{1,6}) coll channels, .{0,40}?(\d{1,6}) nvls channels")),
    ("channels", re.compile(r"\b(\d{1,6}) coll channels, (?!.*nvls channels)")),
    ("connected", re.compile(r"Connected (?:all )?(rings|trees|NVLS tree|NVLS|binomial trees|Collnet)", re.IGNORECASE)),
    ("chose", re.compile(r"(AllReduce): \d{1,18} Bytes -> Algo (\w{1,20}) proto (\w{1,20})")),
)


def read_line(line: str) -> tuple[NcclSaid | Note, ...]:
    """Given a line of a log, return what NCCL says on it; empty for one that is not NCCL's or says nothing of use."""
    begins = _INFO.search(line)
    if begins is None:
        return ()
    if warned := _WARN.search(line):
        return (NcclSaid("warned", (warned.group(1),)), Note("warning", f"NCCL WARN {warned.group(1)}"))
    for what, pattern in _PATTERNS:
        found = pattern.search(line, begins.end())
        if found is not None:
            values = tuple(value.strip() for value in found.groups())
            return (NcclSaid(what, (*values[:2], transport(values[2])) if what == "link" else values),)
    return ()


def is_said(line: str) -> bool:
    """Tell whether a line is NCCL's own: nothing else is to be read out of it."""
    return "NCCL INFO" in line or "NCCL WARN" in line


def transport(way: str) -> str:
    """Given how a channel goes (`SHM/direct/direct`, `NET/IB/0/GDRDMA`), return what compares: `SHM`, `NET/IB/GDRDMA`."""
    parts = way.strip().split("/")
    if parts[0] == "SHM" or len(parts) == 1:
        return parts[0]
    direct = "/GDRDMA" if "GDRDMA" in way else ""
    return f"{parts[0]}/{parts[1]}{direct}"
