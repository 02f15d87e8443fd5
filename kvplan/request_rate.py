"""When the requests of a trace are sent, where options say it in place of the trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import inf
from random import Random
from typing import TYPE_CHECKING

from kvplan.core.request import Request
from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.options import SimulateOptions
    from kvplan.trace import TraceStream


def offered(
    trace: TraceStream, options: SimulateOptions, seconds_per_tick: Fraction | None
) -> Iterable[Request]:
    """The trace's requests with the arrivals that the clients' options ask for.

    In a closed loop none waits for an arrival, unless a rate is given. Raises `InputError` where options clash.
    """
    rate, clients = options.request_rate, options.concurrency
    if options.burstiness is not None and rate is None:
        raise InputError(
            "--burstiness is of drawn arrivals", where="--burstiness", hint="give --request-rate too"
        )
    if options.rate_scale is not None and (rate or clients):
        other = "--request-rate" if rate else "--concurrency"
        raise InputError(
            f"--rate-scale scales the trace's arrivals, which {other} replaces",
            where="--rate-scale",
            hint=f"leave it out, or {other}",
        )
    if rate is not None:
        if seconds_per_tick is None:
            raise InputError(
                "step-numbered arrivals have no seconds", where="--request-rate", hint="give --step-time too"
            )
        gap = 1 / (Fraction(repr(rate)) * seconds_per_tick)
        return at_rate(trace, gap, options.burstiness or 1.0, options.seed or 0)
    if clients is not None:
        return (request.sent_at(0) for request in trace)
    return trace


def at_rate(requests: Iterable[Request], gap: Fraction, burstiness: float, seed: int) -> Iterator[Request]:
    """The requests with arrivals drawn anew, in the mean ``gap`` ticks apart; the first comes after a gap.

    Gaps have a gamma distribution of shape ``burstiness``: 1 is a Poisson process, below it requests come in bursts,
    above it more evenly, infinity in equal gaps (``--burstiness`` of vLLM's serving benchmark, 0.33,
    vllm/benchmarks/serve.py). The benchmark then stretches all gaps so that their sum is as expected; here it is as
    drawn, since the trace is not read to its end first.
    """
    draw = Random(seed)
    mean = float(gap)
    arrival = 0.0
    for request in requests:
        arrival += mean if burstiness == inf else draw.gammavariate(burstiness, mean / burstiness)
        yield request.sent_at(round(arrival))
