"""What is copied to another host: the same bytes for the same modules, nothing missing, nothing that it does not need."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

from autotuner.edge import bundle as bundles
from autotuner.edge.bundle import PACKAGE, bundle, closure


def test_the_same_modules_give_the_same_program() -> None:
    first = bundle("agent", "autotuner.edge.agent")
    bundles.bundle.cache_clear()
    again = bundle("agent", "autotuner.edge.agent")
    assert first.data == again.data
    assert first is not again
    assert first.file_name == f"agent-{first.sha256[:16]}.pyz"


def test_the_agent_is_small_and_holds_the_shim() -> None:
    with zipfile.ZipFile(io.BytesIO(bundle("agent", "autotuner.edge.agent").data)) as archive:
        names = set(archive.namelist())
    edges = ("agent", "host_local", "rungs", "ladder", "commands", "shim")
    assert {"__main__.py", *(f"autotuner/edge/{name}.py" for name in edges)} <= names
    assert not {name for name in names if "/core/" in name or "/engines/" in name or "ssh" in name}


def test_every_module_that_the_load_client_imports_goes_with_it(tmp_path: Path) -> None:
    """Run where our package is not installed: the order is wrong, and it says so, so all of its modules were there."""
    program = tmp_path / "bench.pyz"
    program.write_bytes(bundle("bench", "autotuner.bench.worker").data)
    ran = subprocess.run(
        [sys.executable, "-I", str(program)], input=b"{}\n", capture_output=True, check=False, cwd=tmp_path, timeout=60
    )
    assert ran.returncode == 2, ran.stderr
    assert b"url: Field required" in ran.stderr


def test_a_closure_holds_the_packages_above_its_modules() -> None:
    found = {path.relative_to(PACKAGE).as_posix() for path in closure("autotuner.edge.procfs")}
    assert found == {"__init__.py", "edge/__init__.py", "edge/procfs.py"}
