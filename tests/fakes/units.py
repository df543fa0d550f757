"""Puts the fake systemctl in front of PATH, with the server's template unit as it is shipped, but for where things are."""

import os
import sys
import time
from pathlib import Path

from autotuner.edge.rungs import SHIM

FAKES = Path(__file__).parent
TEMPLATE = FAKES.parents[1] / "systemd" / "autotuner-server@.service"


def can_make_groups() -> bool:
    """Whether this machine lets us make control groups of version 2, which the fake manager and the rung `cgroup` need."""
    places = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
    mounted = next((place for place in places if (place / "cgroup.procs").exists()), None)
    return mounted is not None and os.access(mounted / "cgroup.procs", os.W_OK) and os.geteuid() == 0


def install(folder: Path, launches: Path) -> dict[str, str]:
    """Install the unit for launches in a folder of their own; return the variables with which systemctl is found."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "systemctl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {FAKES / "fake_systemctl.py"} "$@"\n')
    program.chmod(0o755)
    text = TEMPLATE.read_text(encoding="utf-8")
    text = text.replace("@PYTHON@ -I -m autotuner.edge.shim", f"{sys.executable} -I {SHIM}")
    text = text.replace("/var/lib/autotuner/launches", str(launches))
    text = text.replace("/etc/autotuner/environment", str(folder / "environment"))
    (folder / TEMPLATE.name).write_text(text, encoding="utf-8")
    return {"FAKE_SYSTEMD": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def remove(folder: Path, patience_s: float = 30.0) -> None:
    """Wait until the units that were started here have ended, and remove their slice."""
    until = time.monotonic() + patience_s
    while left := list(Path("/sys/fs/cgroup").glob(f"**/fake-{folder.stat().st_ino}.slice")):
        try:
            for slice_ in left:
                slice_.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
