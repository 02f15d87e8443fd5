"""Names that tables of measurements use for models, GPUs and engines, as kvplan knows them.

What the scripts that compare with measurements share; a name that is not here is looked up as it is.
"""

from __future__ import annotations

#: Models that the catalogue lacks, by the one that is most like them and what differs.
QWEN2_72B = (
    *("num_hidden_layers=80", "hidden_size=8192", "num_attention_heads=64", "num_key_value_heads=8"),
    *("intermediate_size=29568", "vocab_size=152064"),
)
VARIANTS = {"Qwen/Qwen2-72B": ("qwen2.5-32b", QWEN2_72B)}

MODELS = {
    "Qwen/Qwen2-7B": "qwen2.5-7b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "huggyllama/llama-7b": "llama-2-7b",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "mixtral-8x22b",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-r1",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "zhipuai/GLM-5": "glm-5",
    "llama2-70b": "llama-2-70b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
}

GPUS = {
    "H100-SXM-80GB": "h100-80gb",
    "H100-SXM-80GB(power-capped)": "h100-80gb",
    "Nvidia H100": "h100-80gb",
    "H200-SXM-141GB": "h200",
    "B200-SXM": "b200",
    "GB200": "gb200",
    "B300-SXM": "b300",
    "GB300": "gb300",
    "A100-SXM4-80GB": "a100-80gb",
    "A100-80GB": "a100-80gb",
    "Nvidia A100": "a100-40gb",
    "Nvidia GH200": "gh200-96gb",
    "L40S-48GB": "l40s",
    "RTX 4090 24GB": "rtx-4090",
    "RTX PRO 6000 96GB": "rtx-pro-6000",
    "AMD MI300X": "mi300x",
    "AMD MI250": "mi250x-gcd",
}


def model_name(name: str) -> str:
    """The model as the catalogue has it."""
    return VARIANTS[name][0] if name in VARIANTS else MODELS.get(name, name)


def overrides_of(name: str) -> tuple[str, ...]:
    """What to set for a model that the catalogue lacks."""
    return VARIANTS[name][1] if name in VARIANTS else ()


def gpu_name(name: str) -> str:
    """The GPU as the catalogue has it."""
    return GPUS.get(name, name)
