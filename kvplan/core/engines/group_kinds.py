"""Groups of layers for the fast engine: which always need the same tokens, and what a sequence holds in each."""

from __future__ import annotations

from collections import deque
from math import lcm
from typing import NamedTuple

from kvplan.core.engine import SchedulerConfig
from kvplan.core.engines.block_side import NEVER
from kvplan.core.window_blocks import KeyedRun, Table


class Kind(NamedTuple):
    """Groups that always need the same tokens: the last ``window`` of a sequence, or all (0).

    ``run`` neighbouring blocks hold all that the next token attends to; hits end at multiples of ``unit`` blocks;
    ``most`` blocks are what the full-sequence check counts at most.
    """

    number: int
    window: int
    block_size: int
    groups: tuple[int, ...]
    run: int
    unit: int
    most: int

    def skip(self, tokens: int) -> int:
        """Leading blocks out of reach once so many tokens are there."""
        return max(0, tokens - self.window + 1) // self.block_size

    def first_reached(self, tokens: int) -> int:
        """The first block that is kept of a hit of so many tokens."""
        return max(0, tokens // self.block_size - self.run) if self.window else 0


def kinds_of(config: SchedulerConfig) -> list[Kind]:
    """The kinds among the groups of a configuration, full ones first, else in the order of the groups."""
    members: dict[tuple[int, int], list[int]] = {}
    for number, group in enumerate(config.groups):
        window = group.window if group.kind == "sliding" else 0
        members.setdefault((window, config.block_size_of(group)), []).append(number)
    alignment = lcm(*(block_size for _, block_size in members))
    kinds: list[Kind] = []
    for (window, block_size), numbers in sorted(members.items(), key=lambda item: item[0][0] > 0):
        kinds.append(
            Kind(
                number=len(kinds),
                window=window,
                block_size=block_size,
                groups=tuple(numbers),
                run=-(-(window - 1) // block_size),
                unit=alignment // block_size,
                most=config.most_blocks(config.groups[numbers[0]], config.max_model_len),
            )
        )
    return kinds


class Tables:
    """What one sequence holds: a table in each group, with slots for the first ``slots`` tokens.

    ``dropped`` blocks of each kind lie behind its window and were given back. The first ``offered`` tokens were offered
    to the cache. ``junction``: the longest prefix that some kind had when the hit was shorter, else 0.
    """

    __slots__ = (
        "dropped",
        "junction",
        "known",
        "last_chunk",
        "next_visit",
        "offered",
        "on_period",
        "runs",
        "slots",
        "spans",
        "start",
        "tail_step",
        "walked",
    )

    def __init__(self, num_kinds: int, num_groups: int) -> None:
        self.spans: list[Table] = [deque() for _ in range(num_groups)]
        self.runs: dict[int, list[KeyedRun]] = {}
        self.dropped = [0] * num_kinds
        self.slots = 0
        self.offered = 0
        self.junction = 0
        #: Tokens of it that were planned last, and those that were processed when that was done.
        self.last_chunk = 0
        self.known = 0
        # While it decodes: its first step, the step in which the blocks at the end of its prompt become findable, the
        # step of the next visit, the last step in which a walk came by, and for each kind whether it drops blocks
        # without content, once in a period.
        self.start = 0
        self.tail_step = NEVER
        self.next_visit = NEVER
        self.walked = -1
        self.on_period = [False] * num_kinds
