"""Whether an engine goes round and round without end."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


class Livelock:
    """States in which nobody ran, since anybody sampled a token, arrived or was aborted: two that are alike tell it.

    Where the pool is too small for a sequence even alone, it preempts itself and starts over (with
    ``scheduler_reserve_full_isl`` off without end). That alone proves nothing: the next time its chunks may begin
    elsewhere, so that less is within a window at once, it may come without the drafts for which there was no room, and
    find more in the cache. So what counts is the state after each call in which somebody was preempted and nobody is
    left who runs: who waits, in which order; the content of the pool, in the order of its eviction; what is in flight.

    Never too early: what an engine does follows from its state. If one comes again and nothing was sampled, arrived or
    was aborted in between, then the same follows as before, for ever.

    Never missed: after the last arrival, abort and token of a run without end, somebody is preempted again and again,
    since there are only so many tokens to compute. Among those who run there is one whom nobody else can throw out
    (FCFS: the first; by priority: the best). Those who stand before it use up their tokens or are thrown out, so its
    turn comes, and it would sample in the end, unless it is preempted: by itself, when it is alone. So there are such
    calls again and again, and only so many states.

    A state is kept as a digest of 128 bits.
    """

    __slots__ = ("_seen", "is_certain")

    def __init__(self) -> None:
        #: Digests of the states so far.
        self._seen: set[bytes] = set()
        #: Whether nobody will ever sample a token, unless somebody arrives or is aborted.
        self.is_certain = False

    def note(self, state: Iterable[object]) -> None:
        """Note a state in which nobody runs: all that decides what follows, as plain values. O(size of it)."""
        if self.is_certain:
            return
        digest = blake2b(digest_size=16)
        for part in state:
            digest.update(f"{part!r},".encode())
        name = digest.digest()
        self.is_certain = name in self._seen
        self._seen.add(name)

    def clear(self) -> None:
        """Somebody sampled a token, arrived or was aborted."""
        self._seen.clear()
        self.is_certain = False
