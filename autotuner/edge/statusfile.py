"""The status file: what the daemon is doing this second, for `autotuner status`. Never read to decide, never synced."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def write(folder: Path, status: dict[str, Any]) -> None:
    """Replace the status file; a full disk only means that it is stale."""
    temporary = folder / ".status.json"
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(status), encoding="utf-8")
        os.replace(temporary, folder / "status.json")  # noqa: PTH105 - one name for the rename everywhere


def read(folder: Path) -> dict[str, Any]:
    """Return the last status; empty if there is none."""
    try:
        value = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
