"""P26: the units as installed, held against systemd's own idea of a sandbox; a directive taken out of one must show in its score.

Works offline, with systemd-analyze alone. Where that is not installed nothing is tried, and the harness says so.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from torture.tally import Tally

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
GATES = {"autotuner.service": 1.5, "autotuner-server@.service": 3.5}
NO_ROOT = re.compile(r"^User=autotuner$", re.MULTILINE)


def run(seed: int, seconds: float) -> Tally:
    """Score both units; then, as far as time goes, score them again without one line of their sandbox each."""
    tally, until = Tally(), time.monotonic() + seconds
    if shutil.which("systemd-analyze") is None:
        tally.counts["units not scored: systemd-analyze is not installed"] += 1
        return tally
    with tempfile.TemporaryDirectory(prefix="autotuner-units-") as name:
        folder = Path(name)
        env = {"PATH": os.environ["PATH"], "DESTDIR": str(folder / "root"), "PREFIX": "/usr"}
        subprocess.run(["sh", str(SYSTEMD / "install.sh")], env=env, check=True, capture_output=True)
        for unit, most in GATES.items():
            text = (folder / "root/etc/systemd/system" / unit).read_text(encoding="utf-8")
            score = _score(folder, unit, text)
            again = f"{unit}: python -m torture --part sandbox --seed {seed}"
            tally.check("P26", kept=score <= most, how=f"{again}: exposure {score}, {most} is promised")
            tally.check("P26", kept=bool(NO_ROOT.search(text)), how=f"{again}: it does not say whom it runs as")
            for line in _sandbox(text):
                if time.monotonic() > until:
                    break
                weaker = _score(folder, unit, text.replace(f"\n{line}\n", "\n", 1))
                tally.check("P26", kept=weaker >= score, how=f"{again}: without {line} the score is better: {weaker}")
                tally.counts["directives taken out"] += 1
    return tally


def _sandbox(text: str) -> list[str]:
    """The lines that close something; what is allowed after that only opens it."""
    opens = ("#", "[", "IPAddressAllow", "DeviceAllow", "ReadWritePaths")
    lines = text.partition("# --- Sandbox")[2].splitlines()
    return [line for line in lines if "=" in line and not line.startswith(opens)]


def _score(folder: Path, unit: str, text: str) -> float:
    """The exposure as systemd-analyze rounds it: 0 is closed, 10 is open."""
    place = folder / unit
    place.write_text(text, encoding="utf-8")
    ran = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"exposure level for \S+: ([0-9.]+)", ran.stdout)
    if found is None:
        raise RuntimeError(f"systemd-analyze says no score of {unit}: {json.dumps(ran.stderr[-300:])}")
    return float(found.group(1))
