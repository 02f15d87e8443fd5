"""Parameters of small models of each family, counted by transformers on the meta device.

Usage: python benchmarks/count_parameters.py tests/data/family_counts.jsonl

Each line of the file has a config, its ``architectures`` and ``parameters``. Every model is built by transformers
and counted again, layers for multi-token prediction left out; lines whose count differs are printed. Families for
which ``AutoModelForCausalLM`` builds a class without encoders are counted so. Needs torch and transformers, which
kvplan does not.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers

#: Class names in configs that transformers spells otherwise.
NAMES = {"KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"}
#: Classes without the encoders, where ``AutoModelForCausalLM`` takes one.
TEXT = {
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}


def count(architecture: str, fields: dict[str, Any]) -> int:
    """Parameters of the model that a config describes."""
    config = getattr(transformers, NAMES.get(architecture, architecture)).config_class(**fields)
    text = TEXT.get(architecture)
    with torch.device("meta"):
        model = (
            getattr(transformers, text)(config.text_config)
            if text
            else getattr(transformers, NAMES.get(architecture, architecture))(config)
        )
    return sum(tensor.numel() for name, tensor in model.named_parameters() if "mtp" not in name)


def main(path: str) -> None:
    """Print the lines that differ, and how many were counted."""
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    for line in lines:
        counted = count(line["architectures"][0], line["config"])
        if counted != line["parameters"]:
            print(f"{line['architectures'][0]}: {counted:,}, the file has {line['parameters']:,}")
    print(f"{len(lines)} models, transformers {transformers.__version__}")


if __name__ == "__main__":
    main(sys.argv[1])
