"""When requests come: when the trace says, or when another one ends.

The two kinds of clients have the same face. ``upcoming`` is the request that comes next, with the tick of its arrival,
or None: then none comes, or none until another one has ended. ``due`` is the tick at which it reaches the engine: the
front end (API server, tokenizer) holds each for the same time. Clients that ``wait`` are told by ``ended`` when
requests end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvplan.core.request import Request


class OpenLoop:
    """Clients that do not wait for answers: each request comes at its own arrival."""

    wait = False

    def __init__(self, requests: Iterable[Request], front_end: int = 0) -> None:
        self._requests = iter(requests)
        self._front_end = front_end
        self.upcoming: Request | None = None
        self.due = 0
        self.advance()

    def advance(self) -> None:
        """The next request, once the engine has the one before."""
        self.upcoming = upcoming = next(self._requests, None)
        if upcoming is not None:
            self.due = upcoming.arrival + self._front_end

    def ended(self, count: int, tick: int) -> None:
        """So many requests ended, which nobody waited for."""


class ClosedLoop:
    """``clients`` clients, each with at most one request under way: it sends the next when its last has ended.

    No request comes before its own arrival. This is what ``--max-concurrency`` of vLLM's serving benchmark does
    (vllm/benchmarks/serve.py, 0.33), whose requests all wait at its semaphore unless a rate is given.
    """

    wait = True

    def __init__(self, requests: Iterable[Request], clients: int, front_end: int = 0) -> None:
        self._requests = iter(requests)
        self._front_end = front_end
        #: Clients that have sent nothing yet, and when each of the others that are free became so, earliest first.
        self._fresh = clients
        self._free: deque[int] = deque()
        self._held = next(self._requests, None)
        self.upcoming: Request | None = None
        self.due = 0
        self._send()

    def advance(self) -> None:
        """The next request, once the engine has the one before: it is another client's."""
        if self._fresh:
            self._fresh -= 1
        else:
            self._free.popleft()
        self._held = next(self._requests, None)
        self._send()

    def ended(self, count: int, tick: int) -> None:
        """So many requests ended at ``tick``, served or turned away."""
        self._free.extend([tick] * count)
        if self.upcoming is None:
            self._send()

    def _send(self) -> None:
        self.upcoming = None
        if self._held is not None and (self._fresh or self._free):
            arrival = max(self._held.arrival, 0 if self._fresh else self._free[0])
            self.upcoming = self._held.sent_at(arrival)
            self.due = arrival + self._front_end


def clients_of(requests: Iterable[Request], num_clients: int | None, front_end: int) -> OpenLoop | ClosedLoop:
    """An open loop, or a closed one of so many clients."""
    if num_clients is None:
        return OpenLoop(requests, front_end)
    return ClosedLoop(requests, num_clients, front_end)
