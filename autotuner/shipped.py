"""Finds the files that come with the program: policies, examples, systemd units.

An installed wheel holds them inside the package; a checkout has them beside it.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """Given `policies`, `examples` or `systemd`, return the folder; FileNotFoundError if this install lacks it."""
    for candidate in (_PACKAGE / "shipped" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"this installation has no {name} folder")
