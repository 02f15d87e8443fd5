"""What the fast engine's scheduler asks of its blocks, whatever groups there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

from kvplan.core.cohort import Member
from kvplan.core.engine import DecodeRun, Turn

#: A place in the running list behind all.
EVERYBODY = 1 << 62
#: More steps, or blocks, than there ever are.
NEVER = 1 << 62


class Hit(Protocol):
    """A prefix found in the cache."""

    @property
    def tokens(self) -> int:
        """How long it is."""


H = TypeVar("H", bound=Hit)


class PoolSums(Protocol):
    """How many blocks of a pool are what."""

    @property
    def free(self) -> int:
        """Free ones."""

    @property
    def idle(self) -> int:
        """Free ones with content."""

    @property
    def shared(self) -> int:
        """Those with more than one user."""

    def take(self, count: int) -> int:
        """Take free blocks; returns how many lost their content."""

    def contents(self) -> Iterator[tuple[object, ...]]:
        """Of each idle block, in the order in which they would be evicted, what tells its content and its copies apart.

        Values that mean the same in every state.
        """


class BlockSide(Protocol[H]):
    """The blocks of all sequences: who holds what, what is found, taken and given back.

    ``seen_serial`` says how far into the running list whoever looks for content stands; ``met_grower`` is set when what
    was looked at is growing by a decode.
    """

    met_grower: bool
    seen_serial: int

    @property
    def pool(self) -> PoolSums:
        """The pool that all groups share."""

    def add(self, member: Member) -> None:
        """Note a new sequence, which holds nothing."""

    def run_step(self, chunks: dict[Member, int]) -> int | None:
        """Move all blocks of a step's running loop, chunks and decodes; returns how many lost their content.

        None, and nothing is done, if free blocks might run short.
        """

    def needed(self, member: Member, tokens: int) -> int:
        """In a running loop that is taken literally: blocks that a sequence lacks for its next tokens.

        What is out of its reach is given back first.
        """

    def end_walk(self) -> None:
        """Note that the running loop was taken literally."""

    def decode(
        self, steps: int, room_for_head: int | None, ending: Iterable[Member]
    ) -> DecodeRun[Member] | None:
        """Let the cohort decode at most ``steps`` steps, its clock included; None if that must be done step by step.

        It ends before a step for which blocks might run short, or, with ``room_for_head`` set, for one after which so
        many blocks might be free, or the head of the queue might find more.
        ``ending`` are done, but hold blocks until their output is processed. Of the run returned, the queues and who
        finishes are left to the caller.
        """

    def join(self, member: Member) -> None:
        """Note a sequence that has just joined the cohort."""

    def leave(self, member: Member, *, took_turn: bool = False) -> None:
        """Note a sequence that has just left the cohort; ``took_turn``: after its token of this step was planned."""

    def find(self, member: Member) -> H:
        """The longest prefix in the cache; at least one token stays to be computed."""

    def shortage(self, member: Member, hit: H, tokens: int) -> int:
        """How many blocks must be free to admit a sequence with so many tokens of its first chunk."""

    def admit(self, member: Member, hit: H, tokens: int) -> int:
        """Adopt a hit, take the blocks of the first chunk and place them; returns how many lost their content.

        The sequence has as many tokens computed as the hit has.
        """

    def place(self, member: Member, tokens: int) -> None:
        """Record the blocks of what was planned, which were taken, and make findable what may be seen."""

    def settle(self, member: Member) -> None:
        """Make findable what a sequence that is done has filled with the output that was in flight."""

    def release(self, member: Member) -> None:
        """Free all that a sequence holds."""

    def count(self, turn: Turn[Member], prefilling: Iterable[Member], ending: Iterable[Member]) -> None:
        """Note the slots of all blocks in use, once the cohort's clock has moved on.

        They are those of decoders and of these sequences; those who are ending fill none any more.
        """


def grower_of(stream: str, live: Mapping[str, Member]) -> Member | None:
    """Who decodes what a stream stands for, None if nobody does; ``live`` has sequences by id."""
    member = live.get(stream[2:]) if stream.startswith("o:") else None
    return member if member is not None and member.decoding else None
