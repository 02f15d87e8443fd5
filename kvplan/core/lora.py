"""What slots for LoRA adapters take: memory that vLLM sets aside when it starts, used or not.

Every linear layer gets, for each of ``max_loras`` slots, a matrix A from its inputs to the rank and a matrix B from
the rank to its outputs (vLLM 0.33, lora/layers/base_linear.py, column_parallel_linear.py, fused_moe.py,
vocab_parallel_embedding.py, logits_processor.py). Under tensor parallelism B of a column-parallel layer and A of a
row-parallel one are divided as the layer is, and the other half is on every rank. Every expert has its own, and gate
and up one each, unless the model's class stores them as one. Encoders of images and sound have none by default.
"""

from __future__ import annotations

from typing import NamedTuple

from kvplan.core.weights import DTYPE_BYTES, Ranks, Stage, WeightGroup

#: Families whose class lists ``embedding_modules``: the vocabulary's table and head take adapters too.
_EMBEDDING_FAMILIES = frozenset(
    {"cohere", "cohere2", "exaone", "exaone4", "falcon_h1", "granite", "granite_moe"}
    | {"granite_moe_shared", "granite_moe_hybrid", "internlm", "internlm3", "jamba", "lfm2", "llama"}
    | {"minicpm", "mistral", "mixtral", "nemotron", "nemotron_h", "phi3", "phimoe", "qwen3", "qwen3_5"}
    | {"qwen3_5_moe", "qwen3_moe"}
)
#: Families whose class sets ``is_3d_moe_weight``: gate and up share one A.
_ONE_GATE_UP = frozenset({"gpt_oss", "qwen3_5_moe", "qwen3_vl_moe"})


class LoraSlots(NamedTuple):
    """Settings of vLLM's ``--enable-lora``, under its names."""

    max_loras: int = 1
    max_lora_rank: int = 16


def lora_bytes(
    groups: tuple[WeightGroup, ...], family: str, dtype: str, slots: LoraSlots, *, ranks: Ranks, stage: Stage
) -> int | None:
    """Bytes of the slots on the largest rank of a pipeline stage; None where the weights are not listed.

    ``family`` is that of the architecture, ``dtype`` the model's.
    """
    if not groups:
        return None
    elements = 0
    for group in groups:
        number = len(group.layers_on(stage)) if group.place != "draft" else 0
        if number:
            elements += number * _slot_elements(group, family, slots, ranks)
    return slots.max_loras * elements * DTYPE_BYTES[dtype]


def _slot_elements(group: WeightGroup, family: str, slots: LoraSlots, ranks: Ranks) -> int:
    """Elements of A and B of one adapter for one layer's module, on one rank."""
    rank = slots.max_lora_rank
    if group.kind in ("table", "head"):
        # A table's A has a row for each word, a head's B too; neither is divided.
        tables = 2 if group.kind == "head" and group.place != "last" else 1
        return tables * rank * (group.rows + group.columns) if family in _EMBEDDING_FAMILIES else 0
    is_router = group.kind == "plain" and group.name.endswith(".gate")
    if group.columns == 1 or not (group.kind in ("linear", "experts") or is_router):
        return 0
    copies, rows, columns = group.on_rank(ranks)
    if group.kind == "experts" and family in _ONE_GATE_UP and group.name.endswith("gate_proj"):
        return copies * rows * rank
    return copies * (rank * columns + rows * rank)
