"""What a trace asks for: one immutable request a line."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

#: Ticks of a second where the clock counts picoseconds.
PICOSECONDS = 10**12

#: Most samples of a request: an engine visits each.
MAX_SAMPLES = 1024


def seconds(ticks: float, seconds_per_tick: Fraction) -> float:
    """Ticks as seconds, rounded once."""
    return ticks * seconds_per_tick.numerator / seconds_per_tick.denominator


class Segment(NamedTuple):
    """A stretch of tokens: ``start .. start+length-1`` of an endless named stream.

    Two tokens are equal when stream and index are equal. The k-th token that request ``ID``
    generates is token k of stream ``o:ID``, so a later prompt can contain an earlier answer.
    """

    stream: str
    start: int
    length: int


class Request(NamedTuple):
    """One request of a trace.

    ``arrival`` is in ticks of the run's clock: picoseconds, or engine steps where arrivals are
    step-numbered. ``output_tokens`` is how many tokens it generates (end-of-sequence is ignored). An empty
    ``content`` is a prompt that shares nothing. Lower ``priority`` goes first. Of ``samples`` answers each has
    ``output_tokens``; the first is the one that stream ``o:ID`` stands for. Its client goes away at tick ``abort``,
    unless it has ended by then; with step-numbered arrivals that is before the step of that number, or, with
    ``abort_mid``, while the engine waits for the output of a batch in it or a later one.
    """

    id: str
    arrival: int
    input_tokens: int
    output_tokens: int
    priority: int = 0
    content: tuple[Segment, ...] = ()
    samples: int = 1
    abort: int | None = None
    abort_mid: bool = False

    def sent_at(self, tick: int) -> Request:
        """The same request from another tick on; its client waits as long before it goes away."""
        name, arrival, prompt, answer, priority, content, samples, abort, abort_mid = self
        if abort is not None:
            abort += tick - arrival
        return Request(name, tick, prompt, answer, priority, content, samples, abort, abort_mid)

    def prompt_content(self) -> tuple[Segment, ...]:
        """The prompt as segments; one that shares nothing is a stream of its own."""
        return self.content or (Segment(f"p:{self.id}", 0, self.input_tokens),)

    def full_content(self) -> tuple[Segment, ...]:
        """Prompt and everything that will be generated, as segments."""
        return (*self.prompt_content(), Segment(f"o:{self.id}", 0, self.output_tokens))

    def refusal(self, max_model_len: int) -> str | None:
        """Why every engine turns it away before it is queued, or None; one token must fit behind the prompt."""
        if self.input_tokens == 0:
            return "empty_prompt"
        return "prompt_reaches_max_model_len" if self.input_tokens >= max_model_len else None
