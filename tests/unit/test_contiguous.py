"""Static batching and the three Orcas on small workloads, by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from kvplan.core.cost import constant, constant_decode
from kvplan.core.engine import DecodeRun
from kvplan.core.engines.contiguous import Contiguous, ContiguousConfig, Reservation
from kvplan.core.metrics import KvFigures, Metrics
from kvplan.core.request import Request
from kvplan.core.simulate import StepRecord, run
from kvplan.errors import DoesNotFit, InputError


def config(
    slots: int,
    longest: int,
    *,
    seqs: int = 8,
    budget: int | None = None,
    reservation: Reservation = "orca-max",
) -> ContiguousConfig:
    return ContiguousConfig(reservation, slots, budget or max(longest, seqs), seqs, longest)


def request(name: str, prompt: int, output: int, arrival: int = 0) -> Request:
    return Request(name, arrival, prompt, output)


def replay(
    settings: ContiguousConfig, reservation: Reservation, requests: list[Request], *, watched: bool = False
) -> tuple[list[StepRecord], Metrics]:
    """Every turn, at a tick a step, and the figures."""
    metrics = Metrics(
        num_gpu_blocks=settings.num_gpu_blocks,
        block_size=1,
        prefix_caching=False,
        seconds_per_tick=Fraction(1),
        usable_blocks=settings.usable_blocks,
    )
    records: list[StepRecord] = []
    outcome = run(
        requests,
        Contiguous(replace(settings, reservation=reservation), watched=watched),
        constant(1),
        metrics,
        decode_price=constant_decode(1),
        observe=records.append,
    )
    assert outcome.status == "done"
    return records, metrics


def finish_ticks(records: list[StepRecord]) -> dict[str, int]:
    return {
        member.id: record.end
        for record in records
        if record.turn is not None
        for member in record.turn.finished
    }


def shares(figures: KvFigures) -> tuple[float | None, ...]:
    return (
        figures.token_share,
        figures.reserved_share,
        figures.internal_fragmentation,
        figures.external_fragmentation,
    )


def tokens_and_places(records: list[StepRecord]) -> tuple[int, int]:
    """Tokens that were sampled, and places of the batch in which one could have been."""
    tokens = places = 0
    for record in records:
        turn: Any = record.turn
        steps = turn.steps if isinstance(turn, DecodeRun) else 1
        sampled = 0 if isinstance(turn, DecodeRun) else len(turn.sampled)
        tokens += steps * turn.decoders + sampled
        places += steps * turn.running
    return tokens, places


def test_a_static_batch_of_100_50_200_30_uses_380_of_800_places() -> None:
    requests = [request(f"r{n}", 10, n) for n in (100, 50, 200, 30)]
    records, _ = replay(config(4 * 256, 256, seqs=4), "static", requests)
    tokens, places = tokens_and_places(records)
    assert (tokens, places) == (380, 800)
    assert tokens / places == 0.475
    assert finish_ticks(records) == {"r30": 30, "r50": 50, "r100": 100, "r200": 200}


def test_nobody_joins_a_static_batch_until_its_longest_is_done() -> None:
    requests = [request("long", 4, 20), request("short", 4, 5), request("next", 4, 5, arrival=1)]
    records, metrics = replay(config(1024, 64), "static", requests)
    assert finish_ticks(records) == {"long": 20, "short": 5, "next": 25}
    assert metrics.batch_figures().running_max == 2
    records, _ = replay(config(1024, 64), "orca-max", requests)
    assert finish_ticks(records) == {"long": 20, "short": 5, "next": 6}


def test_a_static_batch_forms_from_those_who_wait_over_several_steps_if_prompts_are_long() -> None:
    requests = [request(f"r{i}", 40, 10) for i in range(3)]
    records, _ = replay(config(1024, 64, budget=64), "static", requests)
    assert [
        [m.id for m in r.turn.admitted] for r in records[:3] if r.turn and not isinstance(r.turn, DecodeRun)
    ] == [
        ["r0"],
        ["r1"],
        ["r2"],
    ]
    assert finish_ticks(records) == {"r0": 10, "r1": 11, "r2": 12}


def test_a_static_batch_that_is_done_while_it_forms_makes_room_for_the_next() -> None:
    # The second prompt has no room in the first step, nor its reservation beside the first.
    records, _ = replay(config(13, 13), "static", [request("a", 2, 1), request("b", 12, 1)])
    assert finish_ticks(records) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("reservation", "slots"), [("static", 64), ("orca-max", 64), ("orca-pow2", 42), ("orca-oracle", 35)]
)
def test_each_reserves_its_own_way(reservation: Reservation, slots: int) -> None:
    # Of 25 output tokens the paper says that 32 are reserved (section 6.1).
    engine = Contiguous(config(128, 64, reservation=reservation))
    engine.add(request("a", 10, 25))
    assert engine.slots_to_reserve(engine.waiting[0]) == slots
    engine.add(request("b", 50, 13))
    expected = {"orca-pow2": 64, "orca-oracle": 63}.get(reservation, 64)  # 50 + 16 is cut at the longest
    assert engine.slots_to_reserve(engine.waiting[1]) == expected


@pytest.mark.parametrize(("used", "share"), [(50, 0.012), (200, 0.049), (1000, 0.244)])
def test_a_reservation_of_4096_holds_few_tokens_in_the_end(used: int, share: float) -> None:
    records, _ = replay(config(4096, 4096), "orca-max", [request("a", used, 1)])
    (turn,) = [record.turn for record in records]
    assert turn is not None
    held = 4096 - turn.free_blocks
    assert (held, held - turn.empty_slots) == (4096, used)
    assert round((held - turn.empty_slots) / held, 3) == share


def test_the_four_shares_by_hand() -> None:
    # A prompt of 2 and 3 answers, of which the last is never stored: 2, 3, 4 tokens over three ticks in 8 slots.
    _, metrics = replay(config(8, 8), "orca-max", [request("a", 2, 3)])
    assert shares(metrics.kv_figures()) == (9 / 24, 3 / 24, 12 / 24, 0)
    # The oracle reserves 5, which the buddy allocator rounds up to 8.
    _, metrics = replay(config(8, 8), "orca-oracle", [request("a", 2, 3)])
    assert shares(metrics.kv_figures()) == (9 / 24, 3 / 24, 12 / 24, 0)


def test_a_static_sequence_that_is_done_holds_only_waste() -> None:
    # Two places of 8: "a" holds 2 tokens for a tick, then nothing that is read; "b" 2, 3, 4.
    _, metrics = replay(config(16, 8), "static", [request("a", 2, 1), request("b", 2, 3)])
    assert shares(metrics.kv_figures()) == (11 / 48, 3 / 48, 34 / 48, 0)


def test_free_slots_count_as_holes_while_the_head_waits_for_a_piece() -> None:
    # 16 slots: a, b, c, d of 4 each. At tick 2 a and c are done: 8 slots are free, but in no piece of 8, which "big"
    # needs; it joins when b and d are done.
    sizes = {"a": (2, 2), "b": (1, 3), "c": (2, 2), "d": (1, 3)}
    requests = [request(name, *size) for name, size in sizes.items()]
    requests.append(request("big", 4, 4, arrival=1))
    records, metrics = replay(config(16, 16), "orca-oracle", requests)
    assert [record.turn.hole_slots for record in records if record.turn] == [0, 0, 8, 0, 0]
    assert finish_ticks(records) == {"a": 2, "c": 2, "b": 3, "d": 3, "big": 7}
    figures = metrics.kv_figures()
    # 16 slots for two ticks, 8 and as many in holes for one, 8 for four.
    assert figures.external_fragmentation == 8 / (32 + 16 + 32)
    assert figures.utilization.mean == (16 * 2 + 8 + 8 * 4) / (16 * 7)
    assert sum(share or 0 for share in shares(figures)) == pytest.approx(1, abs=1e-15)


def test_what_no_pool_holds_is_turned_away_with_its_reason() -> None:
    engine = Contiguous(config(24, 32, budget=20, reservation="orca-oracle"))
    assert engine.refusal(request("a", 10, 7)) == "reservation_exceeds_pool"  # a piece of 32 of 24 slots
    assert engine.refusal(request("a", 10, 6)) is None
    assert engine.refusal(request("a", 32, 1)) == "prompt_reaches_max_model_len"
    assert engine.refusal(request("a", 0, 1)) == "empty_prompt"
    assert engine.refusal(request("a", 21, 1)) == "prompt_exceeds_max_num_batched_tokens"


def test_an_engine_whose_longest_sequence_fits_no_piece_does_not_start() -> None:
    config(24, 16).check()
    config(24, 24, reservation="static").check()
    with pytest.raises(DoesNotFit, match="largest in a pool of 24 slots is 16") as error:
        config(24, 17).check()
    assert error.value.hint == "at most --max-model-len 16 fits"
    with pytest.raises(InputError, match="splits no prompt: max_num_batched_tokens 15 must reach"):
        config(24, 16, budget=15).check()


@pytest.mark.parametrize("reservation", ["static", "orca-max", "orca-pow2", "orca-oracle"])
def test_a_watched_run_has_the_same_figures(reservation: Reservation) -> None:
    requests = [request(f"r{i}", 3 + i % 5, 1 + 7 * i % 11, arrival=2 * i) for i in range(30)]
    settings = config(64, 16, seqs=5)
    fast, figures = replay(settings, reservation, requests)
    slow, watched = replay(settings, reservation, requests, watched=True)
    assert len(fast) < len(slow)
    assert finish_ticks(fast) == finish_ticks(slow)
    assert figures.kv_figures() == watched.kv_figures()
    assert figures.batch_figures() == watched.batch_figures()
    assert figures.latency({}) == watched.latency({})
    assert figures.scheduled_tokens == watched.scheduled_tokens
