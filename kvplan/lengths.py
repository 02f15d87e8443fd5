"""How many sequences of a distribution of lengths are resident at once: `--lengths`, `--trace`, `--shared-prefix`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from kvplan.core.concurrency import (
    Residents,
    SequenceBlocks,
    Sharing,
    prefix_sharing,
    residents_of_equal,
    residents_of_log_normal,
    residents_of_trace,
)
from kvplan.core.content import Piece, content_runs
from kvplan.core.request import Request
from kvplan.core.sizing import Plan
from kvplan.errors import InputError
from kvplan.options import SizeOptions
from kvplan.units import parse_count

_MAX_TOKENS = 10**10


def residents(options: SizeOptions, plan: Plan, usable_blocks: int, warnings: list[str]) -> Residents:
    """The sequences that ``usable_blocks`` blocks hold, of the lengths that the options name.

    What is assumed beyond the options is added to ``warnings``. Raises `InputError` for options that do not go
    together and for a trace that cannot be read.
    """
    deployment = plan.deployment
    if options.trace is not None and (options.lengths is not None or options.shared_prefix is not None):
        other = "lengths" if options.lengths is not None else "shared-prefix"
        raise InputError(
            f"--trace and --{other} both say what sequences hold", where="--trace", hint="give one of them"
        )
    caching = deployment.enable_prefix_caching
    sharing = Sharing(unit=1, blocks=0)
    if caching:
        sharing = prefix_sharing(plan.pool, deployment.cache.decode_context_parallel_size)
    if options.trace is not None:
        return _of_trace(options.trace, plan, sharing, usable_blocks, warnings)
    prefix = options.shared_prefix or 0
    if prefix > deployment.max_model_len:
        raise InputError(
            f"a prefix of {prefix:,} tokens is beyond max_model_len {deployment.max_model_len:,}",
            where="--shared-prefix",
            hint="give a shorter one",
        )
    if prefix and not caching:
        warnings.append("prefix caching is off: each sequence holds the shared prefix for itself")
    shared = prefix // sharing.unit * sharing.blocks
    if options.lengths is None:
        return residents_of_equal(plan.pool, usable_blocks, max(deployment.seq, prefix), shared)
    mean, p95 = read_lengths(options.lengths)
    if p95 > deployment.max_model_len:
        warnings.append(
            f"lengths beyond max_model_len {deployment.max_model_len:,} are cut off there, as the engine does"
        )
    return residents_of_log_normal(
        plan.pool,
        usable_blocks,
        mean,
        p95,
        longest=deployment.max_model_len,
        shortest=max(1, prefix),
        shared_blocks=shared,
    )


def _of_trace(trace: str, plan: Plan, sharing: Sharing, usable_blocks: int, warnings: list[str]) -> Residents:
    """The sequences of a trace that ``usable_blocks`` hold."""
    from kvplan.trace import read_trace  # lengths alone need no trace

    longest = plan.deployment.max_model_len
    sequences, cut = sequences_of(read_trace(trace).requests, plan.pool.blocks, longest, sharing)
    if cut:
        warnings.append(
            f"{cut:,} of {len(sequences):,} sequences of the trace are longer than max_model_len "
            f"{longest:,} and are counted as cut off there"
        )
    found = residents_of_trace(sequences, usable_blocks, sharing.blocks)
    if found.method == "trace, extended":
        warnings.append(
            f"all {len(sequences):,} sequences of the trace are resident at once: more of the same is reckoned "
            "by their mean"
        )
    return found


def read_lengths(text: str) -> tuple[int, int]:
    """Mean and 95th percentile, in tokens, of ``--lengths mean,p95``; raises `InputError`."""
    parts = text.split(",")
    hint = "write the mean and the 95th percentile of the tokens of a whole sequence, such as 2000,6000"
    if len(parts) != 2:
        raise InputError(f'"{text[:60]}" is not two numbers', where="--lengths", hint=hint)
    mean, p95 = (parse_count(part, where="--lengths") for part in parts)
    if not 0 < mean <= _MAX_TOKENS or not 0 < p95 <= _MAX_TOKENS:
        raise InputError(f'"{text[:60]}" is out of range', where="--lengths", hint=hint)
    return mean, p95


def sequences_of(
    requests: Iterable[Request], blocks: Callable[[int], int], longest: int, sharing: Sharing
) -> tuple[list[SequenceBlocks], int]:
    """Each request as a sequence with its place in the tree of prefixes, and how many are cut to ``longest`` tokens.

    ``blocks`` gives those of a length. O(requests and segments), but for one call of ``blocks`` for each length.
    """
    blocks_of = cache(blocks)
    node_of = _node_numbers()
    sequences = []
    cut = 0
    for request in requests:
        tokens = request.input_tokens + request.output_tokens
        cut += tokens > longest
        tokens = min(tokens, longest)
        parts = _parts(request, tokens, sharing.unit, node_of) if sharing.blocks else ()
        shareable = sharing.blocks * sum(units for _, units in parts)
        sequences.append(SequenceBlocks(tokens, blocks_of(tokens) - shareable, parts))
    return sequences, cut


_NodeKey = tuple[int, int, tuple[Piece, ...]]


def _node_numbers() -> Callable[[_NodeKey], int]:
    """Gives equal content behind an equal prefix the same number, from 1 on."""
    numbers: dict[_NodeKey, int] = {}
    return lambda key: numbers.setdefault(key, len(numbers) + 1)


def _parts(
    request: Request, tokens: int, unit: int, node_of: Callable[[_NodeKey], int]
) -> tuple[tuple[int, int], ...]:
    """The runs of a sequence's full units as nodes, each with how many units of it there are."""
    parts = []
    node = 0
    for run in content_runs(request.full_content(), unit):
        node = node_of((node, run.first, run.key))
        units = min(run.end, tokens // unit) - run.first
        if units <= 0:
            break
        parts.append((node, units))
    return tuple(parts)
