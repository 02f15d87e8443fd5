"""How long one engine step takes, in whole picoseconds, from the shape of its batch.

What a rank reads and computes are whole numbers that come in as `StageShape`s, what its GPU can do as `GpuRates`, how
near an engine comes to that as `StepConstants`. Every coefficient is rounded once to whole picoseconds, so that sums
over steps are exact. docs/latency.md has the formula term by term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import NamedTuple

from kvplan.core.communication import all_reduce
from kvplan.core.engine import StepWork
from kvplan.core.request import PICOSECONDS
from kvplan.core.step_constants import CONSTANT_NAMES, ConstantName, StepConstants
from kvplan.core.step_shape import GpuRates, Matrices, StageShape, pairs_of, read_tokens

_FOREVER = 1 << 62

#: Share of the host link's rate that copies from and to pinned memory reach: an unfitted default.
HOST_LINK_SHARE_PERCENT = 80

#: So often a chunk's own queries, keys, values and results are counted as moved, beside its FLOPs: attention kernels
#: measured on A100, H100, H200 and RTX PRO 6000 move them at 0.35 to 0.5 of the bandwidth, since what a tile reads
#: first and writes last is hidden by nothing.
_CHUNK_MOVES = 2


class Settings(NamedTuple):
    """What of an engine's settings its step times depend on.

    Decode steps of up to ``graph_tokens`` tokens are replayed from a CUDA graph (0: none is). ``overlaps_host``: the
    engine prepares a step while the GPUs run the one before, so that only the slower of the two counts. ``block_bytes``
    are those of one block on one rank.
    """

    graph_tokens: int = 512
    overlaps_host: bool = False
    block_bytes: int = 0


_DEFAULT_SETTINGS = Settings()

#: What of a step's time is owed to each constant, in seconds; they sum to the step's time.
Terms = dict[ConstantName, float]


class LatencyModel:
    """The time of steps of one deployment.

    ``step_ps(work)`` prices any step, ``stage_ps(work, stage)`` what one stage of a pipeline takes of it,
    ``decode(sequences, context)`` a run of steps that only decode, exactly as ``step_ps`` would one by one;
    ``terms(work)`` says what the time is owed to. Batch sizes are priced once and remembered.
    """

    def __init__(
        self,
        stages: Sequence[StageShape],
        rates: GpuRates,
        constants: StepConstants,
        settings: Settings = _DEFAULT_SETTINGS,
    ) -> None:
        """One shape for each stage of the pipeline, in order."""
        self.stages = tuple(_StageTime(shape, rates, constants, settings) for shape in stages)
        self.constants = constants
        block = settings.block_bytes
        self.copy_block_ps = _ps(2 * block / (rates.bandwidth_bytes_per_s * constants.kv_bandwidth_share))
        self.swap_block_ps = 100 * block * PICOSECONDS // (rates.host_bytes_per_s * HOST_LINK_SHARE_PERCENT)
        self._overlaps_host = settings.overlaps_host
        self._step_ps = _ps(constants.step_s)
        self._sequence_ps = _ps(constants.sequence_s)

    def with_constants(self, constants: StepConstants) -> LatencyModel:
        """The same deployment with other constants."""
        one = self.stages[0]
        return LatencyModel([stage.shape for stage in self.stages], one.rates, constants, one.settings)

    def decode(self, sequences: int, context: int) -> tuple[int, int, int]:
        """``(first, growth, valid)`` of steps in which only ``sequences`` decode, ``context`` tokens in the first.

        Step j takes ``first + growth * j`` picoseconds, for j below ``valid``: then a window is full, or the GPU
        begins to take longer than the host. Each step adds a token to every context.
        """
        first, growth, valid = self.stages[0].decode(sequences, context)
        for stage in self.stages[1:]:
            start, more, steps = stage.decode(sequences, context)
            first += start
            growth += more
            valid = min(valid, steps)
        host = self._step_ps + sequences * self._sequence_ps
        if not self._overlaps_host:
            return first + host, growth, valid
        return _at_least(host, first, growth, valid)

    def step_ps(self, work: StepWork) -> int:
        """Picoseconds from the start of a step to its end, through all stages one after another.

        Blocks are copied and swapped before it computes, one after the other.
        """
        host = self.host_ps(work)
        busy = 0
        for stage in self.stages:
            busy += stage.price(work)
        ps = max(host, busy) if self._overlaps_host else host + busy
        return ps + self.moved_ps(work) if work.moves_blocks else ps

    def host_ps(self, work: StepWork) -> int:
        """Picoseconds that the engine itself spends on a step: scheduling it, and what it does with the result."""
        return self._step_ps + self._sequence_ps * (work.decodes + len(work.chunks))

    def moved_ps(self, work: StepWork) -> int:
        """Picoseconds in which blocks are copied and swapped before a step."""
        swapped = work.swapped_out_blocks + work.swapped_in_blocks
        return work.copied_blocks * self.copy_block_ps + swapped * self.swap_block_ps

    def stage_ps(self, work: StepWork, stage: int) -> int:
        """Picoseconds that one stage is busy with a step, from 0 for one that computes nothing."""
        return self.stages[stage].price(work)

    def terms(self, work: StepWork) -> Terms:
        """What of a step's seconds is owed to each constant, without copies and swaps of blocks.

        The time is homogeneous in the coefficients (`StepConstants.coefficients`): a term is the coefficient times the
        time's derivative by it, so the terms sum to the time, and term / coefficient is the quantity that the
        constant prices, as far as it counts at these constants.
        """
        host: Terms = dict.fromkeys(CONSTANT_NAMES, 0.0)
        host["step_s"] = self.constants.step_s
        host["sequence_s"] = self.constants.sequence_s * (work.decodes + len(work.chunks))
        busy: Terms = dict.fromkeys(CONSTANT_NAMES, 0.0)
        for stage in self.stages:
            for name, value in stage.terms(work).items():
                busy[name] += value
        if self._overlaps_host:
            return max(host, busy, key=lambda terms: sum(terms.values()))
        return {name: host[name] + busy[name] for name in CONSTANT_NAMES}


def _at_least(floor: int, first: int, growth: int, valid: int) -> tuple[int, int, int]:
    """Steps as in `LatencyModel.decode` of which none takes less than ``floor``."""
    if first >= floor:
        return first, growth, valid
    below = _FOREVER if growth == 0 else (floor - first) // growth + 1
    return floor, 0, min(valid, below)


def _ps(seconds: float) -> int:
    return round(seconds * PICOSECONDS)


class _Parts(NamedTuple):
    """Seconds of what depends on the number of tokens alone, by the constant that they are owed to."""

    weights_bandwidth_share: float = 0.0
    gemm_flops_share: float = 0.0
    kv_bandwidth_share: float = 0.0
    link_bandwidth_share: float = 0.0
    all_reduce_s: float = 0.0
    kernel_s: float = 0.0


class _StageTime:
    """The time of one stage. Attributes that end in ``_ps`` and ``_s`` are coefficients of a token, unless said."""

    def __init__(
        self, shape: StageShape, rates: GpuRates, constants: StepConstants, settings: Settings
    ) -> None:
        self.shape, self.rates, self.constants, self.settings = shape, rates, constants, settings
        self._by_tokens: dict[int, int] = {}
        self._by_sampled: dict[int, int] = {}
        self._by_sequences: dict[int, int] = {}  # that decode, but for what their context takes
        # Of a step: the least that launches take, and what kernels take beside their bytes and FLOPs.
        self._launch_ps = _ps(shape.kernels * constants.launch_kernel_s)
        self._kernels_s = shape.kernels * constants.kernel_s
        self._set_products()
        self._set_attention()

    def _set_products(self) -> None:
        """Coefficients of matrix products: seconds to read them, and to multiply one token."""
        shape, rates, constants = self.shape, self.rates, self.constants
        bandwidth = rates.bandwidth_bytes_per_s * constants.weights_bandwidth_share

        def computing(flops: int, flops_8bit: int) -> float:
            return (flops / rates.flops_16bit + flops_8bit / rates.flops_8bit) / constants.gemm_flops_share

        def coefficients(matrices: Matrices) -> tuple[float, float]:
            return matrices.read_bytes / bandwidth, computing(matrices.flops, matrices.flops_8bit)

        self._dense, self._head = coefficients(shape.dense), coefficients(shape.head)
        self._experts = [
            (
                one,
                one.read_bytes / bandwidth,
                one.replicas * one.used * one.local / one.total * computing(one.flops, one.flops_8bit),
            )
            for one in shape.experts
        ]
        self._moved_s = shape.activation_bytes / bandwidth

    def _set_attention(self) -> None:
        """Coefficients of attention, of all kinds together as far as they have no window."""
        rates, constants = self.rates, self.constants
        bandwidth = rates.bandwidth_bytes_per_s * constants.kv_bandwidth_share
        flops = rates.flops_16bit * constants.attention_flops_share
        self._context_ps = self._sequence_ps = self._chunk_token_ps = 0
        self._written_s = 0.0
        #: Picoseconds of a token that a chunk reads and of a pair in it, and the window, of each kind.
        self._kinds: list[tuple[int, int, int | None]] = []
        windows: dict[int, int] = {}
        for kind in self.shape.attention:
            read, pair = _ps(kind.context_bytes / bandwidth), _ps(kind.pair_flops / flops)
            self._kinds.append((read, _ps(kind.chunk_pair_flops / flops), kind.window))
            if kind.window is None:
                self._context_ps += max(read, pair)
            else:
                windows[kind.window] = windows.get(kind.window, 0) + max(read, pair)
            self._chunk_token_ps += _ps(_CHUNK_MOVES * kind.chunk_token_bytes / bandwidth)
            self._sequence_ps += _ps(2 * kind.sequence_bytes / bandwidth)
            self._written_s += kind.context_bytes / bandwidth
        self._windows = sorted(windows.items())

    def decode(self, sequences: int, context: int) -> tuple[int, int, int]:
        """As `LatencyModel.decode`, of this stage alone."""
        ps = self._by_sequences.get(sequences)
        if ps is None:
            ps = self._tokens_ps(sequences) + self._head_ps(sequences) + sequences * self._sequence_ps
            self._by_sequences[sequences] = ps
        ps += self._context_ps * context
        growth, valid = self._context_ps * sequences, _FOREVER
        for size, coefficient in self._windows:
            room = sequences * size - context
            if room > 0:
                ps += coefficient * context
                growth += coefficient * sequences
                valid = min(valid, room // sequences + 1)
            else:
                ps += coefficient * sequences * size
        if sequences <= self.settings.graph_tokens:
            return ps, growth, valid
        return _at_least(self._launch_ps, ps, growth, valid)  # the GPU waits for the CPU while that is slower

    def price(self, work: StepWork) -> int:
        """As `LatencyModel.stage_ps`."""
        decodes, chunks = work.decodes, work.chunks
        if not chunks:
            return self.decode(decodes, work.decode_context)[0] if decodes else 0
        tokens, sequences = decodes, decodes + len(chunks)
        chunk_tokens = 0
        ps = self._context_ps * work.decode_context + sequences * self._sequence_ps
        for size, coefficient in self._windows:
            ps += coefficient * min(work.decode_context, decodes * size)
        for before, count in chunks:
            chunk_tokens += count
            for read, pair, window in self._kinds:
                ps += max(read * read_tokens(before, count, window), pair * pairs_of(before, count, window))
        ps += self._chunk_token_ps * chunk_tokens
        tokens += chunk_tokens
        ps += self._tokens_ps(tokens) + self._head_ps(work.sampled)
        return max(ps, self._launch_ps)

    def _tokens_ps(self, tokens: int) -> int:
        found = self._by_tokens.get(tokens)
        if found is None:
            found = self._by_tokens[tokens] = _ps(sum(self._token_parts(tokens)))
        return found

    def _head_ps(self, sampled: int) -> int:
        found = self._by_sampled.get(sampled)
        if found is None:
            found = self._by_sampled[sampled] = _ps(sum(self._head_parts(sampled)))
        return found

    def _token_parts(self, tokens: int) -> _Parts:
        """Of a step of so many tokens: matrix products, what is moved between them and sent, kernels."""
        read, token = self._dense
        reading, computing = _product(read, tokens * token)
        for experts, read, token in self._experts:
            more, computed = _product(read * experts.distinct(tokens), tokens * token)
            reading += more
            computing += computed
        sent, rounds = self._sending(tokens)
        return _Parts(
            reading + tokens * self._moved_s,
            computing,
            tokens * self._written_s,
            sent,
            rounds,
            self._kernels_s,
        )

    def _head_parts(self, sampled: int) -> _Parts:
        read, token = self._head
        return _Parts(*_product(read, sampled * token)) if sampled else _Parts()

    def _sending(self, tokens: int) -> tuple[float, float]:
        """Seconds of bytes that are sent, and of rounds: all-reduces, and what goes to the next stage."""
        link, round_s = self.rates.link, self.constants.all_reduce_s
        share = self.constants.link_bandwidth_share
        sent = rounds = 0.0
        for reduction in self.shape.reductions:
            way = all_reduce(tokens * reduction.token_bytes, reduction.ranks, link, round_s, share)
            rounds += reduction.number * way.rounds * round_s
            sent += reduction.number * way.sent_bytes / (link.bytes_per_s * share)
        if self.shape.sent_bytes:
            rounds += round_s
            sent += tokens * self.shape.sent_bytes / (link.bytes_per_s * share)
        return sent, rounds

    def terms(self, work: StepWork) -> Terms:
        """As `LatencyModel.terms`, of this stage alone."""
        tokens = work.decodes + sum(count for _, count in work.chunks)
        found: Terms = dict.fromkeys(CONSTANT_NAMES, 0.0)
        if not tokens:
            return found
        parts = self._token_parts(tokens), self._head_parts(work.sampled)
        for name in CONSTANT_NAMES:
            found[name] += sum(getattr(part, name, 0.0) for part in parts)
        for name, value in self._attention_terms(work).items():
            found[name] += value
        replayed = not work.chunks and work.decodes <= self.settings.graph_tokens
        launching = self.shape.kernels * self.constants.launch_kernel_s
        if not replayed and launching > sum(found.values()):
            found = dict.fromkeys(CONSTANT_NAMES, 0.0)
            found["launch_kernel_s"] = launching
        return found

    def _attention_terms(self, work: StepWork) -> Terms:
        found: Terms = dict.fromkeys(CONSTANT_NAMES, 0.0)
        bandwidth = self.rates.bandwidth_bytes_per_s * self.constants.kv_bandwidth_share
        flops = self.rates.flops_16bit * self.constants.attention_flops_share
        for kind in self.shape.attention:
            sequences = work.decodes + len(work.chunks)
            found["kv_bandwidth_share"] += 2 * sequences * kind.sequence_bytes / bandwidth
            moved = _CHUNK_MOVES * sum(count for _, count in work.chunks) * kind.chunk_token_bytes
            found["kv_bandwidth_share"] += moved / bandwidth
            context = work.decode_context
            if kind.window is not None:
                context = min(context, work.decodes * kind.window)
            amounts: list[tuple[int, int]] = [(context, context * kind.pair_flops)]
            for before, count in work.chunks:
                pairs = pairs_of(before, count, kind.window)
                amounts.append((read_tokens(before, count, kind.window), pairs * kind.chunk_pair_flops))
            for read, computed in amounts:
                reading, computing = kind.context_bytes * read / bandwidth, computed / flops
                if reading >= computing:
                    found["kv_bandwidth_share"] += reading
                else:
                    found["attention_flops_share"] += computing
        return found


def _product(reading: float, computing: float) -> tuple[float, float]:
    """What of matrix products is owed to reading and to computing: in all the root of the squares.

    Neither of the two hides the other where both take about as long.
    """
    both = sqrt(reading * reading + computing * computing)
    return (reading * reading / both, computing * computing / both) if both else (0.0, 0.0)


def constant(ticks: int) -> Callable[[StepWork], int]:
    """A price that is the same for every step."""
    return lambda _work: ticks


def constant_decode(ticks: int) -> Callable[[int, int], tuple[int, int, int]]:
    """The same price in the form of `LatencyModel.decode`."""
    return lambda _sequences, _context: (ticks, 0, _FOREVER)
