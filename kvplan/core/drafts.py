"""Speculative decoding: what each drafting method asks of the scheduler, and how many drafts are accepted.

No model runs, so what a drafter proposes and what of it is accepted is made up, but the same in every run.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, NamedTuple
from zlib import crc32

DraftMethod = Literal["ngram", "eagle", "draft_model"]


class MethodRules(NamedTuple):
    """What a drafting method asks of the scheduler (vLLM 0.33, v1/core/sched/scheduler.py and config/speculative.py).

    ``lookahead``: whether a request needs slots for as many tokens as there are drafts beyond those scheduled;
    ``extra_input``: slots of the input that a request takes beside its tokens; ``hashed_after``: tokens after a block
    that its hash covers.
    """

    lookahead: bool
    extra_input: int
    hashed_after: int


METHODS: dict[DraftMethod, MethodRules] = {
    "ngram": MethodRules(lookahead=False, extra_input=0, hashed_after=0),
    "eagle": MethodRules(lookahead=True, extra_input=0, hashed_after=1),
    "draft_model": MethodRules(lookahead=True, extra_input=1, hashed_after=0),
}


class Drafting(NamedTuple):
    """Speculative decoding with ``num_drafts`` drafts a step.

    With an ``acceptance_rate`` each draft is right with that chance if all before it are, and a drafter always proposes
    ``num_drafts``. None: as in the recorded runs of the real scheduler, any number from none to all, equally often.
    """

    method: DraftMethod
    num_drafts: int
    acceptance_rate: float | None = None
    seed: int = 0

    @property
    def lookahead(self) -> int:
        """Tokens beyond those scheduled for which a request needs slots."""
        return self.num_drafts if METHODS[self.method].lookahead else 0

    @property
    def extra_input(self) -> int:
        """Slots of the input that each request takes beside its tokens."""
        return METHODS[self.method].extra_input

    @property
    def hashed_after(self) -> int:
        """Tokens after a block that its hash covers."""
        return METHODS[self.method].hashed_after

    def proposed(self, request_id: str, outputs: int) -> int:
        """Drafts that the drafter proposes to a request with so many output tokens."""
        if self.method != "ngram" or self.acceptance_rate is not None:
            return self.num_drafts
        return crc32(f"d:{request_id}:{outputs}".encode()) % (self.num_drafts + 1)

    def accepted(self, request_id: str, outputs: int, drafts: int) -> int:
        """How many of the ``drafts`` verified behind so many output tokens are accepted."""
        if self.acceptance_rate is None:
            return min(drafts, crc32(f"a:{request_id}:{outputs}".encode()) % (self.num_drafts + 1))
        digest = blake2b(f"{self.seed}:{request_id}:{outputs}".encode(), digest_size=8).digest()
        drawn = int.from_bytes(digest, "big") / 2**64
        # At least so many are right with the chance that each is, to that power.
        chance = self.acceptance_rate
        right = 0
        while right < drafts and drawn < chance:
            right += 1
            chance *= self.acceptance_rate
        return right
