"""The topics of `kvplan explain`, worked by hand for Llama-2-13B: 800 KiB a token, 12.5 MiB a block."""

from __future__ import annotations

import json
from heapq import heapify, heapreplace
from typing import Any

import pytest

import kvplan
from kvplan.errors import InputError
from kvplan.jobs.explain import TOPICS
from kvplan.topics.parts import Explanation, Figures, Formula, Grid, Prose, Table, Timeline

TOKEN, BLOCK = 819_200, 13_107_200


def explain(topic: str, **options: object) -> Explanation:
    return kvplan.explain(topic, **options)


def row(found: Explanation, table: str, number: int) -> dict[str, Any]:
    return found.table(table)[number]


@pytest.mark.parametrize("topic", TOPICS)
def test_every_topic_is_a_document_with_all_its_numbers(topic: str) -> None:
    found = explain(topic)
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (document["topic"], document["question"]) == (topic, TOPICS[topic].question)
    assert document["config"]["model"] == {"value": "llama-2-13b", "source": "default"}
    for part in found.parts:
        if isinstance(part, Figures):
            assert {f.key: f.value for f in part.rows}.items() <= document["figures"].items()
        elif isinstance(part, Table):
            keys = [column.key for column in part.columns]
            assert document["tables"][part.key] == [
                dict(zip(keys, values, strict=True)) for values in part.rows
            ]
        elif isinstance(part, Timeline):
            assert document["timelines"][part.key]["steps"] == part.steps
    keys = [f.key for part in found.parts if isinstance(part, Figures) for f in part.rows]
    assert len(keys) == len(set(keys)), "a number has a name of its own"


@pytest.mark.parametrize("topic", TOPICS)
def test_the_same_input_gives_the_same_numbers(topic: str) -> None:
    assert explain(topic).to_dict() == explain(topic).to_dict()


# kv-cache


def test_a_cache_makes_a_triangle_a_line() -> None:
    found = explain("kv-cache", seq=100)
    assert (found.figure("computed_without"), found.figure("computed_with")) == (5050, 100)
    assert found.figure("computed_ratio") == 50.5
    assert found.figure("cache_bytes") == 100 * TOKEN
    assert [one["computed_without"] for one in found.table("lengths")] == [1, 3, 6, 55, 5050]


def test_flops_are_those_of_every_step_summed_up() -> None:
    found = explain("kv-cache", seq=40)
    pair = 2 * 40 * (128 + 128) * 40  # a multiplication and an addition; 40 heads, 40 layers
    logits = 2 * 32_000 * 5_120
    first: Any = row(found, "lengths", 0)["flops_with"]
    token = first - logits - pair
    layers = 40 * (4 * 5_120**2 + 3 * 5_120 * 13_824)
    assert 2 * layers <= token <= 2.001 * layers  # norms are little beside the matrices
    last = row(found, "lengths", -1)
    assert last["flops_with"] == sum(token + logits + pair * t for t in range(1, 41))
    assert last["flops_without"] == sum(token * t + logits + pair * t * (t + 1) // 2 for t in range(1, 41))


def test_a_cache_of_latents_costs_what_they_take() -> None:
    found = explain("kv-cache", model="deepseek-v3", seq=8)
    assert found.figure("computed_without") == 36
    assert found.figure("cache_bytes") == 8 * 70_272  # 61 layers x (512 + 64) x 2 bytes


# formula


def test_the_formula_gives_bytes_of_tokens_and_says_where_texts_err() -> None:
    found = explain("formula")
    assert found.figure("bytes_per_token") == TOKEN == 2 * 40 * 40 * 128 * 2
    assert found.figure("bytes_per_block") == BLOCK
    thousand = row(found, "lengths", 2)
    assert (thousand["tokens"], thousand["bytes"]) == (1000, 819_200_000)
    assert round(thousand["gib"], 3) == 0.763
    assert "0.763 GiB or 0.819 GB" in found.notes[0]


def test_the_formula_knows_grouped_heads_windows_and_states() -> None:
    grouped = explain("formula", model="llama-3.1-8b")
    assert grouped.figure("bytes_per_token") == 131_072
    assert grouped.figure("bytes_per_token_of_all_heads") == 4 * 131_072
    windows = explain("formula", model="gemma-3-27b")
    assert windows.figure("bytes_per_token") == 10 * 16 * 256 * 2
    assert windows.figure("fixed_bytes_per_sequence") == 52 * 1024 * 16 * 256 * 2


def test_the_formula_says_what_grows_and_what_does_not() -> None:
    found = explain("formula", model="deepseek-v4-flash")
    texts = [part.text.split(": ") for part in found.parts if isinstance(part, Formula)]
    fixed = [int(text.split()[0].replace(",", "")) for _, text in texts if "once windows are full" in text]
    growing = [float(text.split()[0].replace(",", "")) for _, text in texts if text.endswith("B a token")]
    assert sum(fixed) == found.figure("fixed_bytes_per_sequence")
    assert sum(growing) == pytest.approx(found.figure("bytes_per_token"), abs=1.5), "each is rounded"
    assert "0.018 GiB or 0.019 GB" in found.notes[0]
    assert "such as 0.0184," in found.notes[0]


def test_the_formula_gives_no_keys_to_layers_that_keep_a_state() -> None:
    first = explain("formula", model="nemotron-h-8b").parts[0]
    assert isinstance(first, Prose)
    assert first.text.startswith("Each layer of attention keeps a key")


def test_the_formula_of_latents_speaks_of_no_heads() -> None:
    latent = explain("formula", model="deepseek-v3")
    texts = [part.text for part in latent.parts if isinstance(part, (Prose, Formula))]
    assert "61 layers x (latent 512 + rotary 64) x 2 B = 70,272 B" in texts
    assert not any("KV heads" in text for text in texts)
    assert "such as 0.067," in latent.notes[0], "0.07 would be right, in GB"
    packed = explain("formula", model="deepseek-v3", kv_cache_dtype="fp8_ds_mla")
    assert "61 layers of mla: 40,016 B a token" in [p.text for p in packed.parts if isinstance(p, Formula)]


# waste


def test_a_reservation_of_4096_wastes_what_is_not_used() -> None:
    found = explain("waste")
    rows = found.table("sequences")
    assert [one["reserved_share"] for one in rows] == [50 / 4096, 200 / 4096, 1000 / 4096]
    assert [one["blocks"] for one in rows] == [4, 13, 63]
    assert [one["paged_waste_bytes"] for one in rows] == [14 * TOKEN, 8 * TOKEN, 8 * TOKEN]
    assert found.figure("reserved_used_share") == 1250 / (3 * 4096)
    assert found.figure("paged_used_share") == 1250 / (80 * 16)
    assert found.figure("sequences_ratio") == 9.6


# blocks


def test_a_token_is_found_by_its_table() -> None:
    found = explain("blocks")
    (grid,) = [part for part in found.parts if isinstance(part, Grid)]
    assert found.figure("token") == 64
    assert (found.figure("logical_block"), found.figure("slot")) == (4, 0)
    table = [run.physical + i for run in grid.pool.table for i in range(run.cells)]
    assert table[4] == found.figure("physical_block") == 11
    assert found.figure("table_bytes") == 256 * 4


def test_with_a_gpu_the_pool_has_a_size() -> None:
    (pool,) = [
        one["here"]
        for one in explain("blocks", gpu="a100-80gb").table("analogy")
        if one["serving"] == "the pool"
    ]
    assert pool == "3,887 blocks, 47.449 GiB"


# block-size


def test_small_blocks_waste_less_and_have_longer_tables() -> None:
    rows: list[dict[str, Any]] = explain("block-size").table("block_sizes")
    assert [one["block_size"] for one in rows] == [4, 16, 64]
    assert [one["table_entries"] for one in rows] == [1024, 256, 64]
    assert [one["mean_empty_slots"] for one in rows] == [1.5, 7.5, 31.5]
    shares = [one["empty_share"] for one in rows]
    assert shares == sorted(shares)
    assert shares[1] < 0.05
    assert rows[0]["hit_rate"] > rows[1]["hit_rate"] > rows[2]["hit_rate"]


# prefix


def test_ten_requests_keep_2000_shared_tokens_once() -> None:
    found = explain("prefix")
    assert found.figure("prefix_bytes") == 1_638_400_000
    assert found.figure("prefix_bytes_of_all") == 16_384_000_000
    assert found.figure("prefix_saved_share") == 0.9
    alone, shared = found.table("runs")
    # Each computes 2,149 tokens in 135 blocks; 10 of them are its own.
    assert (alone["peak_blocks"], alone["computed_tokens"]) == (1350, 21_490)
    assert (shared["peak_blocks"], shared["shared_blocks"]) == (125 + 10 * 10, 125)
    assert shared["computed_tokens"] == 21_490 - 9 * 2000


def test_what_fills_no_block_is_shared_by_nobody() -> None:
    found = explain("prefix", shared_prefix=2007)
    assert row(found, "runs", 1)["shared_blocks"] == 125
    assert "125 blocks and 7 tokens" in found.notes[1]
    nothing = explain("prefix", shared_prefix=5)
    assert (nothing.figure("prefix_saved_share"), nothing.figure("saved_bytes")) == (0.0, 0)
    assert [note for note in nothing.notes if "is saved" in note] == []


# batching


def test_a_static_batch_uses_less_than_half_of_its_slots() -> None:
    found = explain("batching")
    static, continuous = found.table("batching")
    assert (static["steps"], static["slot_share"]) == (600, 0.475)
    assert "30 %" in found.notes[0]
    places = [0] * 4
    heapify(places)
    for output in [100, 50, 200, 30] * 3:  # who is first takes the place that is free first
        heapreplace(places, places[0] + output)
    assert continuous["steps"] == max(places) == 380
    assert continuous["slot_share"] == 1140 / (4 * 380)


def test_only_that_example_is_told_its_text_is_wrong() -> None:
    assert "30 %" not in "".join(explain("batching", outputs="100,50,200,31").notes)


def test_lanes_hold_every_request_once_on_one_place() -> None:
    found = explain("batching", outputs="3,1,2", rounds=2)
    for part in found.parts:
        if isinstance(part, Timeline):
            drawn = [one for lane in part.lanes for one in lane.stretches]
            assert sorted(one.mark for one in drawn) == list("ABCDEF")
            assert sum(one.steps for one in drawn) == 12
            assert len(part.lanes) == 3


# preemption


def test_who_came_last_gives_up_its_blocks() -> None:
    # 15 blocks: at 80 tokens each all three have 5; the next token of A needs a 16th, so C goes. At 112 tokens A and
    # B have 7; the 15 hold 8 of A and 7 of B, so B goes.
    found = explain("preemption")
    again, swapped, ample = found.table("runs")
    assert (again["preemptions"], swapped["preemptions"], ample["preemptions"]) == (2, 2, 0)
    assert found.figure("lost_tokens") == 80 + 112
    assert found.figure("recomputed_tokens") == 80 + 112
    assert swapped["swapped_blocks"] == 5 + 7
    assert found.figure("swapped_bytes") == 2 * 12 * BLOCK
    assert ample["computed_tokens"] == swapped["computed_tokens"] == 3 * 127
    assert again["computed_tokens"] == 3 * 127 + 192


def test_with_room_for_all_nobody_is_preempted() -> None:
    found = explain("preemption", num_gpu_blocks_override=25)
    assert found.figure("preemptions") == found.figure("swapped_bytes") == 0


# paged-attention


@pytest.mark.parametrize("model", ["llama-2-13b", "llama-3.1-8b"])
@pytest.mark.parametrize(("seq", "size"), [(1, 16), (16, 16), (17, 16), (100, 32), (1000, 16)])
def test_blocks_change_no_bit_of_attention(model: str, seq: int, size: int) -> None:
    found = explain("paged-attention", model=model, seq=seq, block_size=size)
    assert found.figure("bitwise_equal") is True
    assert found.figure("blocks") == -(-seq // size)
    rows = found.table("results")
    assert rows[1]["numbers_that_differ"] == 0
    assert rows[2]["equal"] is False


def test_attention_is_that_of_the_formula() -> None:
    import numpy as np

    from kvplan.topics.paged_attention import _attention

    rng = np.random.default_rng(7)
    query = rng.standard_normal((4, 8)).astype(np.float32)
    keys = rng.standard_normal((5, 2, 8)).astype(np.float32)
    values = rng.standard_normal((5, 2, 6)).astype(np.float32)
    found = _attention(query, keys, values)
    for head in range(4):
        scores = keys[:, head // 2] @ query[head] / np.sqrt(8)
        weights = np.exp(scores) / np.exp(scores).sum()
        assert np.allclose(found[head], weights @ values[:, head // 2], atol=1e-5)


# What is wrong


@pytest.mark.parametrize(
    ("topic", "options", "message"),
    [
        ("wast", {}, 'unknown topic "wast" (TOPIC)'),
        ("waste", {"outputs": "3"}, "--outputs has no effect on this topic (--outputs)"),
        ("waste", {"used_tokens": "5,a"}, '"5,a" is no list of whole numbers (--used-tokens)'),
        ("waste", {"used_tokens": "0"}, '"0" is no list of whole numbers (--used-tokens)'),
        ("waste", {"used_tokens": "1" * 5000}, f'"{"1" * 60}..." is too much for an example (--used-tokens)'),
        ("waste", {"used_tokens": "4096"}, "4,096 tokens do not go into a sequence of 4,096"),
        ("batching", {"outputs": ",".join("1" * 27)}, "is too much for an example (--outputs)"),
        ("batching", {"rounds": 10**9}, "380,000,000,000 tokens in all are too many for an example"),
        ("prefix", {"requests": 10**9}, "tokens in all are too many for an example"),
        ("kv-cache", {"seq": 10**9}, "1,000,000,000 is too much for an example (--seq)"),
        ("paged-attention", {"seq": 10**5}, "100,000 is too much for an example (--seq)"),
        ("paged-attention", {"model": "deepseek-v3"}, "keep no keys and values of heads (--model)"),
        ("preemption", {"requests": 27}, "27 requests are too many to draw (--requests)"),
        ("preemption", {"num_gpu_blocks_override": 8}, "8 blocks do not hold one request of 128 tokens"),
        ("waste", {"model": "gemma-3-27b"}, "a model whose layers keep all tokens"),
    ],
)
def test_what_cannot_be_explained_is_an_error(topic: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        explain(topic, **options)
    assert message in str(caught.value)
