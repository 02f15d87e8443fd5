"""Slots for LoRA adapters and tables of rotary positions, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvplan.config import load_model
from kvplan.core.lora import LoraSlots, lora_bytes
from kvplan.core.rotary import rotary_elements
from kvplan.core.weights import WHOLE_MODEL, Ranks, Stage


def slots(model: str, ranks: Ranks | None = None, stage: Stage | None = None, **settings: Any) -> int:
    spec = load_model(model)
    size = lora_bytes(
        spec.weights.groups,
        spec.family,
        "bfloat16",
        LoraSlots(**settings),
        ranks=ranks or Ranks(),
        stage=stage or WHOLE_MODEL,
    )
    assert size is not None
    return size


#: Llama-3.1-8B: inputs and outputs of q, k, v, gate, up, then of o and down.
H, KV, MLP, VOCAB = 4096, 1024, 14336, 128256
COLUMN = [(H, H), (H, KV), (H, KV), (H, MLP), (H, MLP)]
ROW = [(H, H), (MLP, H)]


def test_one_slot_of_llama_by_hand() -> None:
    layer = sum(16 * (inputs + outputs) for inputs, outputs in COLUMN + ROW)
    tables = 2 * 16 * (VOCAB + H)
    assert slots("llama-3.1-8b") == 2 * (32 * layer + tables)
    assert slots("llama-3.1-8b", max_loras=4) == 4 * slots("llama-3.1-8b")
    assert slots("llama-3.1-8b", max_lora_rank=64) == 4 * slots("llama-3.1-8b")


def test_half_of_a_slot_is_divided_among_ranks() -> None:
    ranks = Ranks(4, num_kv_heads=8)
    layer = sum(16 * (inputs + outputs // 4) for inputs, outputs in COLUMN)
    layer += sum(16 * (inputs // 4 + outputs) for inputs, outputs in ROW)
    tables = 2 * 16 * (VOCAB + H)
    assert slots("llama-3.1-8b", ranks) == 2 * (32 * layer + tables)


def test_a_stage_has_the_slots_of_its_layers() -> None:
    first = slots("llama-3.1-8b", stage=Stage(0, 16, is_first=True, is_last=False))
    last = slots("llama-3.1-8b", stage=Stage(16, 32, is_first=False, is_last=True))
    assert first == last
    assert first + last == slots("llama-3.1-8b")


def test_every_expert_has_a_slot() -> None:
    # Qwen3-30B-A3B: 128 experts of 768, gate and up with an A each.
    h, experts = 2048, 128
    attention = sum(16 * (i + o) for i, o in [(h, 4096), (h, 512), (h, 512), (4096, h)])
    expert = 16 * (3 * h + 3 * 768)
    router = 16 * (h + experts)
    tables = 2 * 16 * (151936 + h)
    assert slots("qwen3-30b-a3b") == 2 * (48 * (attention + experts * expert + router) + tables)


def test_models_without_embedding_modules_have_none_for_tables() -> None:
    # Qwen2.5-7B, whose class does not list them.
    h, kv, mlp = 3584, 512, 18944
    pairs = [(h, h), (h, kv), (h, kv), (h, h), (h, mlp), (h, mlp), (mlp, h)]
    assert slots("qwen2.5-7b") == 2 * 28 * sum(16 * (i + o) for i, o in pairs)


@pytest.mark.parametrize(
    ("model", "elements"),
    [
        ("llama-3.1-8b", 131072 * 128),
        ("llama-4-scout", 10485760 * 128),
        # Only the rotated part of a head: 64 of 576, stretched 40 times from 4096.
        ("deepseek-v3", 4096 * 40 * 64),
        ("gpt2", 0),
        ("jamba-v0.1", 0),
    ],
)
def test_rotary_tables_by_hand(model: str, elements: int) -> None:
    spec = load_model(model)
    assert spec.weights.rotary_elements == elements
    assert spec.weights.rotary_bytes("bfloat16") == 2 * elements


def test_each_kind_of_layer_has_a_table() -> None:
    # Gemma-4: sliding layers rotate 256 of a head, full ones heads of 512.
    rope = {"full_attention": {"rope_type": "proportional"}, "sliding_attention": {"rope_type": "default"}}
    config = {
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 1000,
        "rope_parameters": rope,
    }
    assert rotary_elements("gemma4", config) == 1000 * (256 + 512)


def test_part_of_a_head_may_be_rotated() -> None:
    config = {"head_dim": 80, "max_position_embeddings": 2048, "partial_rotary_factor": 0.4}
    assert rotary_elements("phi", config) == 2048 * 32
