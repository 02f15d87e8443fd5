"""The synthetic workloads that ship with kvplan, made anew from their seeds.

``python -m kvplan.workloads FOLDER`` writes them. Lengths are log-normal, arrivals Poisson unless said; all
chance comes from one seeded generator each, so the same code gives the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from kvplan.core.request import PICOSECONDS, Request, Segment
from kvplan.trace import to_json_line

_MILLISECOND = PICOSECONDS // 1000


def chat(rng: Random) -> Iterator[Request]:
    """Single questions to assistants: one of five system prompts, then words of the user's own."""
    systems = [(f"sys:{i}", length) for i, length in enumerate((1180, 742, 512, 256, 93))]
    now = 0.0
    for i in range(1500):
        now += rng.expovariate(16.0)
        stream, shared = rng.choices(systems, weights=(30, 25, 20, 15, 10))[0]
        own = _length(rng, median=140, sigma=0.9, longest=3000)
        name = f"chat-{i}"
        yield Request(
            name,
            _ticks(now),
            shared + own,
            _length(rng, median=180, sigma=0.7, longest=1200),
            content=(Segment(stream, 0, shared), Segment(f"p:{name}", 0, own)),
        )


def multi_turn(rng: Random) -> Iterator[Request]:
    """Conversations: each turn repeats all before it, answers included, and adds a question."""
    turns: list[Request] = []
    start = 0.0
    for i in range(260):
        start += rng.expovariate(1.6)
        now = start
        history = [Segment("sys:assistant", 0, 310)]
        for turn in range(rng.choices(range(1, 8), weights=(22, 22, 18, 14, 10, 8, 6))[0]):
            name = f"talk-{i}.{turn}"
            question = _length(rng, median=60, sigma=0.8, longest=900)
            answer = _length(rng, median=170, sigma=0.6, longest=900)
            history.append(Segment(f"p:{name}", 0, question))
            prompt = sum(segment.length for segment in history)
            turns.append(Request(name, _ticks(now), prompt, answer, content=tuple(history)))
            history.append(Segment(f"o:{name}", 0, answer))
            # The next question comes when the answer was read: 25 tokens a second out, then time to think.
            now += answer / 25 + rng.expovariate(1 / 12.0)
    yield from sorted(turns, key=lambda request: request.arrival)


def long_documents(rng: Random) -> Iterator[Request]:
    """Questions about long documents, some asked again about the same one; answers are short."""
    documents = [(f"doc:{i}", _length(rng, median=14000, sigma=0.7, longest=90000)) for i in range(120)]
    now = 0.0
    for i in range(260):
        now += rng.expovariate(0.9)
        stream, length = documents[min(int(rng.expovariate(1 / 30.0)), len(documents) - 1)]
        question = _length(rng, median=40, sigma=0.6, longest=400)
        name = f"doc-{i}"
        yield Request(
            name,
            _ticks(now),
            length + question,
            _length(rng, median=220, sigma=0.6, longest=1500),
            content=(Segment(stream, 0, length), Segment(f"p:{name}", 0, question)),
        )


def bursts(rng: Random) -> Iterator[Request]:
    """Batch jobs: bursts of like requests at one moment, long silence between; nothing is shared."""
    now = 0.0
    count = 0
    for _ in range(24):
        median = rng.choice((250, 800, 2200))
        for _ in range(rng.randint(12, 60)):
            yield Request(
                f"job-{count}",
                _ticks(now),
                _length(rng, median=median, sigma=0.4, longest=8000),
                _length(rng, median=260, sigma=0.8, longest=2000),
                priority=rng.choice((0, 0, 0, 1)),
            )
            count += 1
        now += 6 + rng.expovariate(1 / 14.0)


#: Name, seed and maker of each workload.
WORKLOADS: dict[str, tuple[int, Callable[[Random], Iterator[Request]]]] = {
    "chat": (20261130, chat),
    "multi-turn": (20261201, multi_turn),
    "long-documents": (20261202, long_documents),
    "bursts": (20261203, bursts),
}


def generate(name: str) -> str:
    """A workload as kvplan JSONL."""
    seed, make = WORKLOADS[name]
    return "".join(to_json_line(request) + "\n" for request in make(Random(seed)))


def _length(rng: Random, *, median: int, sigma: float, longest: int) -> int:
    """A log-normal number of tokens, at least one and at most ``longest``."""
    return max(1, min(longest, round(median * rng.lognormvariate(0, sigma))))


def _ticks(seconds: float) -> int:
    """Picoseconds, in whole milliseconds so that lines stay short."""
    return round(seconds * 1000) * _MILLISECOND


def main(folder: str) -> None:
    """Write every workload into a folder."""
    for name in WORKLOADS:
        (Path(folder) / f"{name}.jsonl").write_text(generate(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
