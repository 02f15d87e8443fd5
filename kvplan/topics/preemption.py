"""`kvplan explain preemption`: a pool that is too small for all who were let in."""

from __future__ import annotations

from string import ascii_uppercase

from kvplan.core.engine import StepWork
from kvplan.core.request import Request
from kvplan.errors import InputError
from kvplan.step_time import step_flops
from kvplan.topics.example import Example, Trial, try_out
from kvplan.topics.parts import (
    Column,
    Explanation,
    Figure,
    Figures,
    Lane,
    Prose,
    Table,
    Timeline,
    Value,
    stretches,
)

#: Marks of a step of a request.
_PROMPT, _DECODE, _LOST, _AGAIN, _BACK = "p", "=", "!", "r", "b"


def explain(example: Example) -> Explanation:
    """Who loses its blocks when, and what it costs to have them computed again, or swapped out and in."""
    example.check_runnable()
    count = example.choose("requests", 3)
    prompt = example.choose("input_tokens", 64)
    answer = example.choose("output_tokens", 64)
    example.check_small(count * (prompt + answer))
    if count > len(ascii_uppercase):
        raise InputError(
            f"{count} requests are too many to draw",
            where="--requests",
            hint=f"at most {len(ascii_uppercase)}",
        )
    size, each = example.block_size, -(-(prompt + answer) // example.block_size)
    # All prompts find room and a block more each; one whole request does, all of them do not.
    room = example.choose("num_gpu_blocks_override", max(each, count * -(-prompt // size) + count) + 1)
    if room - 1 < each:
        raise InputError(
            f"{room} blocks do not hold one request of {prompt + answer} tokens",
            where="--num-gpu-blocks-override",
            hint=f"give at least {each + 1}: the null block holds nothing",
        )
    requests = [Request(ascii_uppercase[i], 0, prompt, answer) for i in range(count)]
    length = prompt + answer
    small = try_out(requests, example.vllm(room - 1, seats=count, length=length))
    ample = try_out(requests, example.vllm(count * each, seats=count, length=length))
    swapped = try_out(requests, example.paged(room - 1, seats=count, cpu_blocks=count * each))
    figures = small.metrics.preemption_figures()
    lost = [tokens for moment in small.moments for tokens in moment.lost_tokens]
    let_in = len(small.moments[0].scheduled)
    flops = step_flops(example.served)
    again = sum(flops.of(StepWork(chunks=[(0, tokens)])) for tokens in lost) if flops else None
    moved = swapped.metrics.preemption_figures()
    rows: tuple[tuple[Value, ...], ...] = tuple(
        (
            name,
            blocks,
            len(trial.moments),
            trial.scheduled_tokens,
            trial.metrics.preemption_figures().events,
            trial.metrics.preemption_figures().swapped_out_blocks,
        )
        for name, blocks, trial in (
            ("computed again (vLLM)", room - 1, small),
            ("swapped (the paper)", room - 1, swapped),
            ("none: room for all", count * each, ample),
        )
    )

    def drawn(key: str, title: str, trial: Trial, loud: str) -> Timeline:
        lanes = (*(_lane(request.id, trial) for request in requests), _free(trial, room - 1))
        longest = max(len(small.moments), len(swapped.moments))
        return Timeline(key, title, len(trial.moments), lanes, longest, loud)

    return example.explanation(
        [
            Prose(
                f"A request of {prompt} tokens in and {answer} out takes {each} blocks of {size} tokens at the end. "
                f"{count} of them want {count * each}; the pool has {room - 1}, and lets in {let_in} by their prompts. "
                + (
                    "When one needs its next block and none is free, who came last gives up all of its own, waits, "
                    "and is computed again."
                    if figures.events
                    else "Nobody has to give up a block."
                )
            ),
            drawn(
                "recompute",
                f"Computed again ({_PROMPT} prompt, {_DECODE} decoding, {_LOST} preempted, {_AGAIN} computed again, "
                ". waiting or done)",
                small,
                _LOST + _AGAIN + _PROMPT,
            ),
            drawn(
                "swap",
                f"Swapped by the paper's engine ({_LOST} out, {_BACK} back in)",
                swapped,
                _LOST + _BACK + _PROMPT,
            ),
            Table(
                "runs",
                (
                    Column("preempted", "who is preempted is", "text"),
                    Column("blocks", "blocks"),
                    Column("steps", "steps"),
                    Column("computed_tokens", "computed"),
                    Column("preemptions", "events"),
                    Column("swapped_blocks", "swapped"),
                ),
                rows,
            ),
            Figures(
                (
                    Figure("preemptions", "preemptions", figures.events),
                    Figure("lost_tokens", "tokens thrown away", sum(lost)),
                    Figure("recomputed_tokens", "computed again", figures.recomputed_tokens),
                    Figure("recompute_flops", "which takes", again, "flops"),
                    Figure(
                        "swapped_bytes",
                        "swapped out and in",
                        (moved.swapped_out_blocks + moved.swapped_in_blocks) * example.block_bytes,
                        "exact_bytes",
                    ),
                )
            ),
        ],
        [
            "vLLM's V1 engine always computes again, which a prefix cache can spare in part: here there is none. "
            "The paper's engine takes the victim with the most tokens generated, of equals who came last."
        ],
    )


def _lane(name: str, trial: Trial) -> Lane:
    """A request's steps. Who comes back computes again what it had, or goes on at once."""
    marks, computed, high, had = [], 0, 0, 0
    for moment in trial.moments:
        mark, tokens = ".", moment.scheduled.get(name, 0)
        if name in moment.preempted:
            mark, had, computed = _LOST, computed, 0
        elif tokens:
            if name in moment.resumed and tokens == 1:
                mark, computed = _BACK, had
            else:
                mark = _AGAIN if computed < high else _PROMPT if tokens > 1 else _DECODE
            computed += tokens
            high = max(high, computed)
        marks.append(mark)
    return Lane(name, stretches(marks))


def _free(trial: Trial, usable: int) -> Lane:
    """Free blocks of each step as a digit, 9 for more."""
    return Lane("free", stretches([str(min(9, usable - moment.used)) for moment in trial.moments]))
