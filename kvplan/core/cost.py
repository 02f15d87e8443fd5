"""How long one engine step takes, in whole picoseconds, from the shape of its batch.

What a rank reads and computes are whole numbers that come in as `StageShape`s, what its GPU can do as `GpuRates`, how
near an engine comes to that as `StepConstants`. Every coefficient is rounded once to whole picoseconds, so that sums
over steps are exact. docs/latency.md has the formula term by term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import NamedTuple

from kvplan.core.communication import Link, all_reduce
from kvplan.core.engine import StepWork
from kvplan.core.request import PICOSECONDS
from kvplan.core.step_constants import CONSTANT_NAMES, ConstantName, StepConstants

_FOREVER = 1 << 62

#: Share of the host link's rate that copies from and to pinned memory reach: an unfitted default.
HOST_LINK_SHARE_PERCENT = 80

#: So often a chunk's own queries, keys, values and results are counted as moved, beside its FLOPs: attention kernels
#: measured on A100, H100, H200 and RTX PRO 6000 move them at 0.35 to 0.5 of the bandwidth, since what a tile reads
#: first and writes last is hidden by nothing.
_CHUNK_MOVES = 2


class GpuRates(NamedTuple):
    """What one GPU's datasheet promises: dense FLOP/s with 16-bit and with 8-bit operands, bytes/s of its links."""

    bandwidth_bytes_per_s: int
    flops_16bit: int
    flops_8bit: int
    link: Link
    host_bytes_per_s: int = 1


class Matrices(NamedTuple):
    """Matrices that every token (or every sampled one) is multiplied with, on one rank, all layers together.

    ``flops`` and ``flops_8bit`` are those of one token with 16-bit and with 8-bit operands.
    """

    read_bytes: int = 0
    flops: int = 0
    flops_8bit: int = 0


class Experts(NamedTuple):
    """Routed experts of equal layers, all layers together, on one rank.

    The rank holds ``local`` of each layer's ``total`` experts (or a slice of each); a token uses ``used`` of the total.
    ``read_bytes`` are those of one expert on the rank, summed over the layers; FLOPs are those of one token in one
    expert, over the layers too. ``replicas`` is how many data-parallel replicas send tokens here.
    """

    total: int
    local: int
    used: int
    read_bytes: int
    flops: int = 0
    flops_8bit: int = 0
    replicas: int = 1

    def distinct(self, tokens: int) -> float:
        """Experts of a layer that so many tokens are expected to use, if each picks its own at random."""
        return self.local * (1.0 - (1.0 - self.used / self.total) ** (tokens * self.replicas))


class Attention(NamedTuple):
    """Layers of one kind on one rank, all together.

    ``context_bytes`` are read for each token that is attended to, at most ``window`` of them, and written for each new
    one; ``pair_flops`` are those of one token's attention to one other while decoding, ``chunk_pair_flops`` in a chunk
    of a prompt. ``chunk_token_bytes`` are a token's query, key, value and result in a chunk. ``sequence_bytes`` are
    read and written in each step for each sequence, whatever its length (states).
    """

    context_bytes: int = 0
    pair_flops: int = 0
    chunk_pair_flops: int = 0
    chunk_token_bytes: int = 0
    window: int | None = None
    sequence_bytes: int = 0


class Reductions(NamedTuple):
    """So many all-reduces in a step, among ``ranks`` ranks, to which each token adds ``token_bytes``."""

    number: int
    ranks: int
    token_bytes: int


class StageShape(NamedTuple):
    """What one rank of one pipeline stage reads, computes and sends.

    ``kernels`` run in each step. For each token ``activation_bytes`` are moved between matrix products and
    ``sent_bytes`` go to the next stage.
    """

    kernels: int
    dense: Matrices = Matrices()
    head: Matrices = Matrices()
    experts: tuple[Experts, ...] = ()
    attention: tuple[Attention, ...] = ()
    activation_bytes: int = 0
    reductions: tuple[Reductions, ...] = ()
    sent_bytes: int = 0


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

    def decode(self, sequences: int, context: int) -> tuple[int, int, int]:
        """``(first, growth, valid)`` of steps in which only ``sequences`` decode, ``context`` tokens in the first.

        Step j takes ``first + growth * j`` picoseconds, for j below ``valid``: then a window is full, or the GPU
        begins to take longer than the host. Each step adds a token to every context.
        """
        first = growth = 0
        valid = _FOREVER
        for stage in self.stages:
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
        host, moved = self.host_ps(work), self.moved_ps(work)
        busy = sum(stage.price(work) for stage in self.stages)
        return (max(host, busy) if self._overlaps_host else host + busy) + moved

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


class _StageTime:
    """The time of one stage."""

    def __init__(
        self, shape: StageShape, rates: GpuRates, constants: StepConstants, settings: Settings
    ) -> None:
        self.shape, self.rates, self.constants, self.settings = shape, rates, constants, settings
        self._tokens: dict[int, int] = {}
        self._heads: dict[int, int] = {}
        self._launch_ps = _ps(shape.kernels * constants.launch_kernel_s)
        self._windows: list[tuple[int, int]] = []
        self._context_ps = 0
        self._state_ps = 0
        bandwidth = rates.bandwidth_bytes_per_s * constants.kv_bandwidth_share
        flops = rates.flops_16bit * constants.attention_flops_share
        windows: dict[int, int] = {}
        self._kinds: list[tuple[int, int, int | None]] = []
        self._chunk_token_ps = 0
        for kind in shape.attention:
            read = _ps(kind.context_bytes / bandwidth)
            pair = _ps(kind.pair_flops / flops)
            self._kinds.append((read, _ps(kind.chunk_pair_flops / flops), kind.window))
            if kind.window is None:
                self._context_ps += max(read, pair)
            else:
                windows[kind.window] = windows.get(kind.window, 0) + max(read, pair)
            self._chunk_token_ps += _ps(_CHUNK_MOVES * kind.chunk_token_bytes / bandwidth)
            self._state_ps += _ps(2 * kind.sequence_bytes / bandwidth)
        self._windows = sorted(windows.items())

    def decode(self, sequences: int, context: int) -> tuple[int, int, int]:
        """As `LatencyModel.decode`, of this stage alone."""
        ps = self._tokens.get(sequences)
        if ps is None:
            ps = self._tokens_ps(sequences)
        ps += self._head_ps(sequences) + sequences * self._state_ps + self._context_ps * context
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
        ps = self._context_ps * work.decode_context + sequences * self._state_ps
        for size, coefficient in self._windows:
            ps += coefficient * min(work.decode_context, decodes * size)
        for before, count in chunks:
            chunk_tokens += count
            for read, pair, window in self._kinds:
                ps += max(read * _read(before, count, window), pair * _pairs(before, count, window))
        ps += self._chunk_token_ps * chunk_tokens
        tokens += chunk_tokens
        known = self._tokens.get(tokens)
        ps += self._tokens_ps(tokens) if known is None else known
        ps += self._head_ps(work.sampled)
        return max(ps, self._launch_ps)

    def _tokens_ps(self, tokens: int) -> int:
        """What depends on the number of tokens in the step alone: matrix products, all-reduces, layers."""
        found = self._tokens[tokens] = _ps(sum(self._token_terms(tokens).values()))
        return found

    def _head_ps(self, sampled: int) -> int:
        found = self._heads.get(sampled)
        if found is None:
            found = self._heads[sampled] = _ps(sum(self._head_terms(sampled).values()))
        return found

    def _token_terms(self, tokens: int) -> Terms:
        shape, rates, constants = self.shape, self.rates, self.constants
        found: Terms = dict.fromkeys(CONSTANT_NAMES, 0.0)
        found["kernel_s"] = shape.kernels * constants.kernel_s
        self._add_product(found, shape.dense.read_bytes, tokens, shape.dense)
        for experts in shape.experts:
            read = experts.read_bytes * experts.distinct(tokens)
            uses = tokens * experts.replicas * experts.used * experts.local / experts.total
            self._add_product(found, read, uses, Matrices(0, experts.flops, experts.flops_8bit))
        moved = tokens * shape.activation_bytes
        found["weights_bandwidth_share"] += moved / (
            rates.bandwidth_bytes_per_s * constants.weights_bandwidth_share
        )
        written = tokens * sum(kind.context_bytes for kind in shape.attention)
        found["kv_bandwidth_share"] += written / (rates.bandwidth_bytes_per_s * constants.kv_bandwidth_share)
        self._add_sending(found, tokens)
        return found

    def _head_terms(self, sampled: int) -> Terms:
        found: Terms = dict.fromkeys(CONSTANT_NAMES, 0.0)
        if sampled:
            self._add_product(found, self.shape.head.read_bytes, sampled, self.shape.head)
        return found

    def _add_product(self, found: Terms, read: float, uses: float, matrices: Matrices) -> None:
        """Add the time of matrix products: the root of the squares of reading and computing.

        Neither of the two hides the other where both take about as long.
        """
        rates, constants = self.rates, self.constants
        reading = read / (rates.bandwidth_bytes_per_s * constants.weights_bandwidth_share)
        full = matrices.flops / rates.flops_16bit + matrices.flops_8bit / rates.flops_8bit
        computing = uses * full / constants.gemm_flops_share
        both = sqrt(reading * reading + computing * computing)
        if both:
            found["weights_bandwidth_share"] += reading * reading / both
            found["gemm_flops_share"] += computing * computing / both

    def _add_sending(self, found: Terms, tokens: int) -> None:
        link, constants = self.rates.link, self.constants
        share = constants.link_bandwidth_share
        for reduction in self.shape.reductions:
            message = tokens * reduction.token_bytes
            way = all_reduce(message, reduction.ranks, link, constants.all_reduce_s, share)
            found["all_reduce_s"] += reduction.number * way.rounds * constants.all_reduce_s
            found["link_bandwidth_share"] += reduction.number * way.sent_bytes / (link.bytes_per_s * share)
        if self.shape.sent_bytes:
            found["all_reduce_s"] += constants.all_reduce_s
            found["link_bandwidth_share"] += tokens * self.shape.sent_bytes / (link.bytes_per_s * share)

    def terms(self, work: StepWork) -> Terms:
        """As `LatencyModel.terms`, of this stage alone."""
        tokens = work.decodes + sum(count for _, count in work.chunks)
        found: Terms = dict.fromkeys(CONSTANT_NAMES, 0.0)
        if not tokens:
            return found
        for part in (self._token_terms(tokens), self._head_terms(work.sampled), self._attention_terms(work)):
            for name, value in part.items():
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
                pairs = _pairs(before, count, kind.window)
                amounts.append((_read(before, count, kind.window), pairs * kind.chunk_pair_flops))
            for read, computed in amounts:
                reading, computing = kind.context_bytes * read / bandwidth, computed / flops
                if reading >= computing:
                    found["kv_bandwidth_share"] += reading
                else:
                    found["attention_flops_share"] += computing
        return found


def _read(before: int, count: int, window: int | None) -> int:
    """Tokens whose keys and values a chunk reads."""
    return before + count if window is None else min(before, window) + count


def _pairs(before: int, count: int, window: int | None) -> int:
    """Pairs of a token of a chunk and one that it attends to, itself included."""
    if window is None or before + count <= window:
        return count * before + count * (count + 1) // 2
    growing = max(0, window - before)  # tokens whose window is not full
    return growing * before + growing * (growing + 1) // 2 + (count - growing) * window


class Flops(NamedTuple):
    """Floating-point operations of one rank.

    Of a token's matrix products without the vocabulary's, of a sequence that samples, and of a pair: one token's
    attention to one token of its context.
    """

    per_token: int
    per_logits: int
    per_pair: int

    def of(self, work: StepWork) -> int:
        """Those of a step; as a price, it has the clock count them."""
        tokens, pairs = work.decodes, work.decode_context
        for before, count in work.chunks:
            tokens += count
            pairs += _pairs(before, count, None)
        return self.per_token * tokens + self.per_logits * work.sampled + self.per_pair * pairs


def constant(ticks: int) -> Callable[[StepWork], int]:
    """A price that is the same for every step."""
    return lambda _work: ticks


def constant_decode(ticks: int) -> Callable[[int, int], tuple[int, int, int]]:
    """The same price in the form of `LatencyModel.decode`."""
    return lambda _sequences, _context: (ticks, 0, _FOREVER)
