"""Cases that random scenarios reach too seldom, followed by hand, with both engines side by side."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from random_scenarios import compare_engines

from kvplan.core.engine import SchedulerConfig
from kvplan.core.request import Request, Segment

BOTH = pytest.mark.parametrize("publish_at_once", [False, True])


def config(**changes: object) -> SchedulerConfig:
    """Room for everything: 40 usable blocks of 2, 20 tokens a step, 8 sequences of at most 20 tokens."""
    settings: dict[str, object] = {
        "num_gpu_blocks": 41,
        "block_size": 2,
        "max_num_batched_tokens": 20,
        "max_num_seqs": 8,
        "max_model_len": 20,
    }
    return SchedulerConfig(**(settings | changes))  # type: ignore[arg-type]


def ask(name: str, arrival: int, output: int, *content: tuple[str, int, int]) -> Request:
    segments = tuple(Segment(*piece) for piece in content)
    return Request(name, arrival, sum(segment.length for segment in segments), output, 0, segments)


@BOTH
@pytest.mark.parametrize("skip", [False, True])
def test_without_chunks_the_head_gets_in_when_an_answer_has_grown(publish_at_once: bool, skip: bool) -> None:
    """Four decode, so 16 tokens are left. The head of 19 finds 2 of them at first, 4 once the answer has a block."""
    requests = [
        ask("a", 0, 15, ("s", 0, 2)),
        *(ask(f"r{i}", 0, 15, (f"p{i}", 0, 2)) for i in range(3)),
        ask("head", 1, 1, ("s", 0, 2), ("o:a", 0, 14), ("p", 0, 3)),
    ]
    settings = config(enable_chunked_prefill=False)
    compare_engines(settings, requests, publish_at_once=publish_at_once, skip=skip)


@BOTH
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_without_chunks_the_head_gets_in_as_soon_as_one_less_decodes(
    publish_at_once: bool, skip: bool, asynchronous: bool
) -> None:
    """Three decode, so 17 tokens are left for a head of 18, until one of them has its last token planned."""
    requests = [
        ask("a", 0, 4, ("a", 0, 2)),
        *(ask(f"r{i}", 0, 15, (f"p{i}", 0, 2)) for i in range(2)),
        ask("head", 1, 1, ("h", 0, 18)),
    ]
    settings = config(enable_chunked_prefill=False, async_scheduling=asynchronous)
    compare_engines(settings, requests, publish_at_once=publish_at_once, skip=skip)


@BOTH
def test_a_victim_that_is_done_but_for_its_output_stands_before_the_one_whose_turn_it_is(
    publish_at_once: bool,
) -> None:
    """In call 4 all 7 blocks are taken, "urgent" needs one, and "done" has its last token in flight."""
    requests = [
        ask("done", 0, 4, ("d", 0, 2))._replace(priority=2),
        ask("urgent", 1, 6, ("u", 0, 2)),
        ask("other", 1, 6, ("o", 0, 1))._replace(priority=1),
    ]
    settings = config(num_gpu_blocks=8, policy="priority", async_scheduling=True)
    seen = compare_engines(settings, requests, publish_at_once=publish_at_once, skip=False)
    assert (seen["preemptions"], seen["finished while waiting"]) == (1, 1)


@BOTH
def test_what_an_aborted_sequence_has_in_flight_is_nothing_that_happens(publish_at_once: bool) -> None:
    """After the only one that runs, nobody ever can: so many calls later the run is given up."""
    requests = [
        ask("a", 0, 10, ("a", 0, 2))._replace(abort=3, abort_mid=True),
        ask("never", 1, 1, ("n", 0, 12)),
    ]
    settings = config(num_gpu_blocks=5, async_scheduling=True)
    seen = compare_engines(settings, requests, publish_at_once=publish_at_once, skip=False)
    assert (seen["aborted"], seen["steps"]) == (1, 10)


@BOTH
@pytest.mark.parametrize("usable", [40, 12])
def test_a_prompt_fills_a_block_in_the_step_in_which_a_later_answer_does(
    publish_at_once: bool, usable: int
) -> None:
    """Both compute the same token in each step from step 4 on; the prompt stands first, so its copy is first."""
    requests = [
        ask("prompt", 0, 1, ("s", 0, 5), ("o:g", 0, 10)),
        ask("filler", 0, 18, ("f", 0, 1)),
        ask("g", 4, 12, ("s", 0, 5)),
        ask("later", 7, 1, ("s", 0, 5), ("o:g", 0, 2)),
        ask("last", 9, 1, ("s", 0, 5), ("o:g", 0, 3)),
    ]
    settings = config(long_prefill_token_threshold=1, num_gpu_blocks=1 + usable)
    compare_engines(settings, requests, publish_at_once=publish_at_once, skip=False)


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_prompts_and_answers_that_fill_equal_blocks_side_by_side(first: int) -> None:
    """As before, drawn: with preemptions in between, who stands first in the running list decides what is seen."""
    for seed in range(first, first + 50):
        rng = Random(seed)
        offset, shared = rng.randint(3, 8), rng.randint(3, 9)
        requests = [
            ask("prompt", 0, rng.choice([1, 5]), ("s", 0, shared), ("o:g", 0, 10)),
            *(ask(f"f{i}", rng.randint(0, 3), rng.randint(12, 18), (f"f{i}", 0, 1)) for i in range(2)),
            ask("g", offset, 12, ("s", 0, shared)),
            *(
                ask(
                    f"r{i}",
                    offset + rng.randint(1, 6),
                    rng.choice([1, 4]),
                    ("s", 0, shared),
                    ("o:g", 0, 1 + i),
                )
                for i in range(2)
            ),
        ]
        settings = config(
            long_prefill_token_threshold=rng.choice([1, 1, 2]),
            num_gpu_blocks=rng.randint(11, 25),
            policy=rng.choice(["fcfs", "priority"]),
        )
        requests.sort(key=lambda request: request.arrival)
        for publish_at_once in (False, True):
            compare_engines(settings, requests, publish_at_once=publish_at_once, skip=False)
        settings = replace(settings, async_scheduling=True)
        compare_engines(settings, requests, publish_at_once=seed % 2 == 0, skip=False)


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_private_prompts_that_end_at_a_block_and_are_asked_for_now_and_then(first: int) -> None:
    """Prompt and answer of each are one node until another prompt names its stream or its own turn is undone."""
    for seed in range(first, first + 50):
        rng = Random(seed)
        requests = []
        for i in range(12):
            content: list[tuple[str, int, int]] = []
            if i and rng.random() < 0.3:
                earlier = rng.randrange(i)
                length = requests[earlier].input_tokens
                content = [(f"p:r{earlier}", 0, length + rng.choice([-1, 0, 0, 1])), (f"o:r{earlier}", 0, 3)]
            arrival, answer = i * rng.randint(1, 2), rng.choice([1, 4, 9])
            request = ask(f"r{i}", arrival, answer, *(content or [("", 0, 2 * rng.randint(1, 4))]))
            request = request._replace(priority=rng.choice([0, 1, 2]))
            requests.append(request if content else request._replace(content=()))
        settings = config(
            max_num_batched_tokens=rng.choice([8, 20]),
            long_prefill_token_threshold=rng.choice([0, 2]),
            num_gpu_blocks=rng.randint(11, 25),
            policy=rng.choice(["fcfs", "priority"]),
        )
        requests.sort(key=lambda request: request.arrival)
        for publish_at_once in (False, True):
            compare_engines(settings, requests, publish_at_once=publish_at_once, skip=rng.random() < 0.5)
        settings = replace(settings, async_scheduling=True)
        compare_engines(settings, requests, publish_at_once=seed % 2 == 0, skip=seed % 4 < 2)
