"""`kvplan explain batching`: batches that end with their longest against requests that come and go at every step."""

from __future__ import annotations

from string import ascii_uppercase

from kvplan.core.request import Request
from kvplan.topics.example import Example, Trial, try_out
from kvplan.topics.parts import (
    Column,
    Explanation,
    Formula,
    Lane,
    Prose,
    Stretch,
    Table,
    Timeline,
    Value,
)
from kvplan.units import counted, format_share

_EXAMPLE = (100, 50, 200, 30)


def explain(example: Example) -> Explanation:
    """Both ways with as many places as there are answers in a batch, drawn step by step."""
    example.check_runnable()
    outputs = example.tokens("outputs", ",".join(map(str, _EXAMPLE)))
    rounds = example.choose("rounds", 3)
    places, longest = len(outputs), max(outputs)
    example.check_small(rounds * sum(outputs))
    requests = [
        Request(f"{turn * places + i}", 0, 1, output)
        for turn in range(rounds)
        for i, output in enumerate(outputs)
    ]
    blocks = places * -(-(longest + 1) // example.block_size)
    static = try_out(requests, example.static(longest + 1, seats=places))
    continuous = try_out(requests, example.vllm(blocks, seats=places))
    static_steps, continuous_steps = len(static.moments), len(continuous.moments)
    tokens = rounds * sum(outputs)
    rows: tuple[tuple[Value, ...], ...] = tuple(
        (
            name,
            steps,
            tokens / steps,
            tokens / (places * steps),
            _mean_end(trial),
        )
        for name, steps, trial in (
            ("static", static_steps, static),
            ("continuous", continuous_steps, continuous),
        )
    )
    named = " + ".join(f"{output:,}" for output in outputs)
    share = sum(outputs) / (places * longest)
    notes = []
    if outputs == _EXAMPLE:
        notes.append(
            f"This is a well-known example, and a well-known text says that its batch uses 30 % of its slots: the "
            f"sum gives {format_share(share)}."
        )
    notes.append(
        "Steps count alike here. In truth a step with a prompt in it takes longer; kvplan simulate prices steps."
    )
    return example.explanation(
        [
            Prose(
                f"{counted(places, 'place')}; answers of {', '.join(f'{output:,}' for output in outputs)} tokens come "
                f"{counted(rounds, 'time')} over. A static batch ends with its longest; who is done leaves an empty "
                "place until then. With continuous batching the next request takes it in the same step."
            ),
            Timeline("static", "Static", static_steps, _lanes(static, places), static_steps),
            Timeline("continuous", "Continuous", continuous_steps, _lanes(continuous, places), static_steps),
            Formula(
                f"slots of a static batch in use: ({named}) / ({places} x {longest:,}) = {sum(outputs):,} / "
                f"{places * longest:,} = {format_share(share)}"
            ),
            Table(
                "batching",
                (
                    Column("batching", "batching", "text"),
                    Column("steps", "steps"),
                    Column("tokens_per_step", "tokens a step"),
                    Column("slot_share", "slots in use", "share"),
                    Column("mean_end_step", "mean end, step"),
                ),
                rows,
            ),
            Prose(
                f"The same {tokens:,} tokens take {static_steps / continuous_steps:.2f} times as many steps in static "
                "batches."
            ),
        ],
        notes,
    )


def _mean_end(trial: Trial) -> float:
    """The mean step after which a request was done."""
    ends = [record.finished for record in trial.records if record.finished is not None]
    return sum(ends) / len(ends)


def _lanes(trial: Trial, places: int) -> tuple[Lane, ...]:
    """Each request on the first place that is free when it is admitted."""
    taken: list[list[Stretch]] = [[] for _ in range(places)]
    begun: dict[str, tuple[int, int]] = {}
    for step, moment in enumerate(trial.moments):
        for name in moment.scheduled:
            if name not in begun:
                busy = {place for place, _ in begun.values()}
                begun[name] = (min(set(range(places)) - busy), step)
        for name in moment.finished:
            place, first = begun.pop(name)
            taken[place].append(Stretch(first, step + 1 - first, ascii_uppercase[int(name) % 26]))
    return tuple(Lane(f"place {i + 1}", tuple(stretches)) for i, stretches in enumerate(taken))
