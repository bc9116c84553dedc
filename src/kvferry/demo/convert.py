"""`python -m kvferry.demo.convert GGUF DIRECTORY`: a GGUF Llama as plain safetensors and tokenizer.

The object that `transformers` makes of a GGUF file cannot be saved as it is; its weights are copied
into a model of the same config, in the dtype of the config.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def convert(gguf: Path, directory: Path) -> None:
    """Write config, weights (bfloat16), tokenizer and chat template to `directory`."""
    folder, name = str(gguf.parent), gguf.name
    source = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    settings = source.config.to_dict()
    for stale in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(stale, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    # Strict: a weight that is missing, unknown or still packed stops the conversion here.
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.bfloat16()
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
