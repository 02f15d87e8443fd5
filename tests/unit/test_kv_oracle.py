"""Pages, groups, blocks and capacities against what vLLM 0.33.0's own planner gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.kv_cache import (
    Cache,
    CacheFormat,
    ChunkedLocal,
    FullAttention,
    LatentAttention,
    LayerCache,
    Mamba2State,
    Reservation,
    SlidingWindow,
)
from kvplan.core.kv_groups import (
    GroupRules,
    blocks_per_sequence,
    bytes_per_block,
    form_groups,
    hybrid_block_size,
    make_pages,
)
from kvplan.hf_config import Origin, spec_from_config

DATA = Path(__file__).parents[1] / "golden" / "data"
SPECS = json.loads((DATA / "kv_specs.json").read_text())
GROUPS = json.loads((DATA / "kv_groups.json").read_text())
#: The planner ran without asynchronous scheduling: one batch of this many tokens is in flight.
IN_FLIGHT = SPECS["settings"]["max_num_batched_tokens"]


def layers_of(row: dict[str, Any]) -> tuple[LayerCache, ...]:
    """The layers of a row: read from its config.json where it has one, else made of its fields."""
    fields = row["config"]
    if "hf" in fields:
        return spec_from_config(
            fields["hf"], origin=Origin("kv_specs.json", row["model"]), source="test"
        ).layers
    return tuple(LayerCache(i, cache_of(fields, i)) for i in range(fields["num_hidden_layers"]))


def cache_of(fields: dict[str, Any], layer: int) -> Cache:
    if "kv_lora_rank" in fields:
        return LatentAttention(fields["kv_lora_rank"], fields["qk_rope_head_dim"])
    if "mamba" in fields:
        heads, head_dim = fields["num_heads"], fields["mamba_head_dim"]
        return Mamba2State(heads, head_dim, fields["state_size"], fields["n_groups"], fields["conv_kernel"])
    heads, head_dim = fields["num_key_value_heads"], fields["head_dim"]
    pattern = fields.get("pattern", "none")
    # "5:1" is five local layers before each full one.
    local = pattern == "all" or (pattern != "none" and (layer + 1) % (int(pattern.split(":")[0]) + 1) != 0)
    if not local:
        return FullAttention(heads, head_dim)
    if "sliding_window" in fields:
        return SlidingWindow(heads, head_dim, fields["sliding_window"])
    return ChunkedLocal(heads, head_dim, fields["attention_chunk_size"])


def test_all_rows_are_there() -> None:
    assert len(SPECS["models"]) == 24
    assert len(GROUPS["shapes"]) == 7


@pytest.mark.parametrize("row", SPECS["models"], ids=lambda row: row["model"])
def test_a_model_is_laid_out_as_the_planner_does(row: dict[str, Any]) -> None:
    dtype = SPECS["settings"]["model_dtype"]
    kv_cache_dtype = dtype if row["kv_cache_dtype"] == "auto" else row["kv_cache_dtype"]
    form = CacheFormat(dtype, kv_cache_dtype, row["tp"], encoder_tokens=IN_FLIGHT)
    layers = layers_of(row)
    block_size = hybrid_block_size(layers, form, row["requested_block_size"], multiple=16)
    pages = make_pages(layers, form, block_size)
    groups = form_groups(pages, form, GroupRules())
    need = Reservation(row["max_model_len"], IN_FLIGHT)

    wanted = row["layer_specs"].values()
    assert sorted((spec["layers"], spec["page_size_bytes"]) for spec in wanted) == sorted(
        (sum(p.cache.kind == kind for p in pages), next(p.page_bytes for p in pages if p.cache.kind == kind))
        for kind in {p.cache.kind for p in pages}
    )
    for spec in wanted:
        if spec["block_size"] != row["max_model_len"]:  # that of states: without prefix caching all of it
            assert spec["block_size"] == block_size
        if "unpadded_state_bytes" in spec:
            state = next(item.cache for item in layers if item.cache.kind not in ("full", "mla"))
            assert state.page_bytes(block_size, form) == spec["unpadded_state_bytes"]
    assert [(len(g.pages), g.page_bytes, g.blocks(need, form)) for g in groups] == [
        (g["layers"], g["page_size_bytes_per_layer"], g["max_blocks_per_request"]) for g in row["groups"]
    ]
    assert bytes_per_block(groups, GroupRules()) == row["bytes_per_block"]
    num_blocks = SPECS["available_bytes"] // bytes_per_block(groups, GroupRules())
    assert num_blocks == row["num_blocks"]
    assert num_blocks * bytes_per_block(groups, GroupRules()) == row["pool_bytes"]
    concurrency = num_blocks / blocks_per_sequence(groups, need, form)
    assert round(concurrency, 4) == row["max_concurrency"]
    assert int(concurrency * row["max_model_len"]) == row["capacity_tokens"]


@pytest.mark.parametrize("shape", GROUPS["shapes"], ids=lambda shape: shape["shape"])
def test_mixed_layers_are_grouped_as_the_planner_does(shape: dict[str, Any]) -> None:
    full = FullAttention(*shape["full_heads_dim"])
    sliding = SlidingWindow(*shape["sliding_heads_dim"], shape["window"])
    layers = [
        LayerCache(i, full if (i + 1) % shape["full_every"] == 0 else sliding) for i in range(shape["layers"])
    ]
    form = CacheFormat("bfloat16", "bfloat16")
    groups = form_groups(make_pages(layers, form, GROUPS["requested_block_size"]), form, GroupRules())
    names = {"full": "FullAttentionSpec", "sliding_window": "SlidingWindowSpec"}
    assert [(names[g.kinds[0]], len(g.pages), g.block_size, g.page_bytes) for g in groups] == [
        (g["spec"], g["layers"], g["block_size"], g["page_bytes"]) for g in shape["groups"]
    ]
    assert GROUPS["available_bytes"] // bytes_per_block(groups, GroupRules()) == shape["num_blocks"]
