"""Versions of engines: comparing them, and the cheap question that finds the installed one. Pure."""

import re

# The module that a help command starts, and the distribution whose version it is.
_DISTRIBUTIONS = {"sglang": "sglang", "vllm": "vllm", "autotuner": "xllamacpp"}


def release(version: str) -> tuple[int, ...]:
    """Given a version (`0.5.15.post1`, `v0.33.0+cu128`), return the numbers it begins with."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match.group(1).split(".")) if match else ()


def within(version: str | None, since: str, before: str) -> bool:
    """Given a version, tell whether a fact holds for it: from `since` on and before `before`; empty is no limit.

    For an unknown version, what holds for the newest releases is taken to hold.
    """
    if version is None or not release(version):
        return not before
    number = release(version)
    return (not since or number >= release(since)) and (not before or number < release(before))


def version_argv(python: str, module: str) -> tuple[str, ...] | None:
    """Given an interpreter and the module a server is started with, return the command that prints its version.

    It reads the distribution's metadata, which takes a moment, where importing the engine takes half a minute.
    """
    distribution = _DISTRIBUTIONS.get(module.partition(".")[0])
    if distribution is None:
        return None
    return (python, "-c", f"import importlib.metadata as m; print(m.version({distribution!r}))")
