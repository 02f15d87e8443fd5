"""What would make a deployment fit, or hold more: each change planned as if its flags had been given.

Every candidate goes through `kvplan.serving`, so a suggestion's effect is what `size` says with its flags added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

from kvplan.core.gpu import Gpu, capability
from kvplan.core.kv_cache import KV_DTYPE_BYTES
from kvplan.core.model import ModelSpec
from kvplan.core.sizing import Capacity, Suggestion
from kvplan.errors import InputError
from kvplan.options import Resolver, SizeOptions, flag
from kvplan.serving import Served, serve, would_fit
from kvplan.units import counted

#: What the engine may be told to use at most: the rest is for what it does not count.
_HIGHEST_UTILIZATION = 98
_FEWEST_BATCHED_TOKENS = 512
_FEWEST_SEQS = 8
_MOST_RANKS = 64
_MOST_STAGES = 8
#: A way out of two changes is looked for until so many are found.
_PAIRS = 3

Flags = Mapping[str, object]


class _Kind(NamedTuple):
    """A kind of change: its flags from the smallest step to the largest, given the flags set so far.

    ``steady``: if a step fits, so does every larger one, and the least is found by bisection. ``is_setting``: the GPUs
    and the weights stay as they are.
    """

    name: str
    steps: Callable[[Flags], Sequence[Flags]]
    steady: bool = True
    is_setting: bool = True


def suggest(
    spec: ModelSpec,
    options: SizeOptions,
    served: Served,
    gpu_count: int | None,
    catalogue: Callable[[], Iterable[Gpu]],
) -> tuple[Suggestion, ...]:
    """Changes to a deployment that has a memory budget, the smallest first, each with its effect.

    Where it does not fit, those that make it fit, and pairs of them where none alone does with the sequences that
    were asked for; else those that let more sequences in. ``catalogue`` lists the GPUs to choose from.
    """
    assert served.capacity is not None, "the caller gives a budget"
    search = _Search(spec, options, served, gpu_count, catalogue)
    if served.capacity.fits:
        return tuple(search.improvements())
    return tuple(search.remedies())


class _Search:
    def __init__(
        self,
        spec: ModelSpec,
        options: SizeOptions,
        served: Served,
        gpu_count: int | None,
        catalogue: Callable[[], Iterable[Gpu]],
    ) -> None:
        self._spec = spec
        self._options = options
        self._served = served
        self._deployment = served.deployment
        self._count = gpu_count
        self._gpus = cache(catalogue)
        if options.max_model_len == "auto":
            # The length that was found is kept, so that effects compare.
            self._options = options.but({"max_model_len": self._deployment.max_model_len})
        settings = (
            _Kind("gpu_memory_utilization", self._utilizations),
            _Kind("max_num_batched_tokens", self._batches),
            _Kind("max_num_seqs", self._seqs),
            _Kind("enforce_eager", self._eager),
            _Kind("kv_cache_dtype", self._cache_dtypes),
        )
        hardware = (
            _Kind("quantization", self._quantizations, is_setting=False),
            _Kind("tensor_parallel_size", self._tensor_ranks, steady=False, is_setting=False),
            _Kind("pipeline_parallel_size", self._stages, steady=False, is_setting=False),
            _Kind("gpu", self._larger_gpus, steady=False, is_setting=False),
        )
        self._kinds = (*settings, *hardware)

    # Where it does not fit

    def remedies(self) -> Iterator[Suggestion]:
        """Single changes that make it fit; pairs where none alone keeps the sequences that were asked for."""
        settings = [kind for kind in self._kinds if kind.is_setting]
        hardware = [kind for kind in self._kinds if not kind.is_setting]
        shorter = self._shorter()
        found = [self._least(kind, {}) for kind in settings]
        if not any(found):
            found += self._pairs(list(combinations(settings, 2)))
        # Who named no length asked for none in particular.
        found = [shorter, *found] if self._length_is_assumed else [*found, shorter]
        found.append(self._fewer())
        larger = [self._least(kind, {}) for kind in hardware]
        if not any(larger):
            larger += self._pairs([*product(settings, hardware), *combinations(hardware, 2)])
        found += larger
        for flags in found:
            if flags is None:
                continue
            served = self._serve(flags)
            if served.capacity is not None and served.capacity.fits:
                yield self._suggestion(flags, served, self._effect(served))

    def _pairs(self, pairs: Iterable[tuple[_Kind, _Kind]]) -> list[Flags]:
        """The first pairs of kinds that do together what neither does alone."""
        found: list[Flags] = []
        for first, second in pairs:
            if len(found) == _PAIRS:
                break
            flags = self._least_pair(first, second)
            if flags is not None:
                found.append(flags)
        return found

    def _least_pair(self, first: _Kind, second: _Kind) -> Flags | None:
        if first.is_setting:
            # The one that steps finest, the utilization, is fitted last.
            fixed, fitted = (first, second) if not second.is_setting else (second, first)
            base = self._strongest(fixed)
            return None if base is None else self._least(fitted, base)
        steps = [
            flags for base in first.steps({}) for flags in ({**base, **more} for more in second.steps(base))
        ]
        steps.sort(key=self._gpus_of)
        return self._first(steps, by_bisection=False)

    def _gpus_of(self, flags: Flags) -> int:
        """GPUs of a replica with the flags set."""
        sizes = (
            flags.get("tensor_parallel_size", self._deployment.tensor_parallel_size),
            flags.get("pipeline_parallel_size", self._deployment.pipeline_parallel_size),
        )
        return math.prod(size for size in sizes if isinstance(size, int))

    def _strongest(self, kind: _Kind) -> Flags | None:
        """The largest step that the engine accepts."""
        return next((flags for flags in reversed(kind.steps({})) if self._fits(flags) is not None), None)

    def _least(self, kind: _Kind, base: Flags) -> Flags | None:
        """The smallest step that makes it fit, together with the flags ``base``; None: no step does."""
        return self._first([{**base, **step} for step in kind.steps(base)], by_bisection=kind.steady)

    def _first(self, steps: Sequence[Flags], *, by_bisection: bool) -> Flags | None:
        """The first step that fits; None where the last that the engine accepts does not."""
        while steps and self._fits(steps[-1]) is None:
            steps = steps[:-1]
        if not steps or not self._fits(steps[-1]):
            return None
        if not by_bisection:
            return next(flags for flags in steps if self._fits(flags))
        low, high = 0, len(steps) - 1
        while low < high:
            middle = (low + high) // 2
            if self._fits(steps[middle]):
                high = middle
            else:
                low = middle + 1
        return steps[high]

    @property
    def _length_is_assumed(self) -> bool:
        return self._options.seq is None and self._options.max_model_len is None

    def _shorter(self) -> Flags | None:
        """The longest length at which the sequences fit, by the bisection that the engine itself does."""
        capacity, deployment, pool = self._capacity, self._deployment, self._served.plan.pool
        low, high = 0, min(capacity.max_model_len_that_fits, deployment.max_model_len)
        while low < high:
            middle = (low + high + 1) // 2
            if pool.blocks(middle) * deployment.concurrency <= capacity.usable_blocks:
                low = middle
            else:
                high = middle - 1
        if low == 0 or low >= max(deployment.seq, deployment.max_model_len):
            return None
        asked = self._options.seq
        if asked is None:
            return {"max_model_len": low}
        if asked <= capacity.max_model_len_that_fits and asked <= low:
            # The sequences are not too long, only the longest that the engine is to serve.
            return {"max_model_len": capacity.max_model_len_that_fits}
        return {"max_model_len": low, "seq": low} if low < asked else None

    def _fewer(self) -> Flags | None:
        """The concurrency that fits."""
        fewer = min(self._capacity.concurrent_sequences, self._deployment.max_num_seqs)
        return {"concurrency": fewer} if 0 < fewer < self._deployment.concurrency else None

    # Where it fits

    def improvements(self) -> Iterator[Suggestion]:
        """One step of each kind, where it lets more sequences in."""
        before = self._capacity.concurrent_sequences
        for kind in self._kinds:
            for flags in kind.steps({}):
                served = self._try(flags)
                capacity = served.capacity if served else None
                if served is None or capacity is None or not capacity.fits:
                    continue
                if capacity.concurrent_sequences > before:
                    after = capacity.concurrent_sequences
                    effect = f"{after:,} sequences instead of {before:,}{self._on(served)}"
                    yield self._suggestion(flags, served, effect)
                    break

    # Planning

    @property
    def _capacity(self) -> Capacity:
        assert self._served.capacity is not None, "the caller gives a budget"
        return self._served.capacity

    def _arguments(self, flags: Flags) -> tuple[SizeOptions, Gpu | None, int | None, int | None, int]:
        """Options, GPU, its count, length and concurrency with the flags set."""
        gpu, count = self._served.gpu, self._count
        changes = dict(flags)
        name = changes.pop("gpu", None)
        if isinstance(name, str):
            number, _, rest = name.partition("x") if self._count is not None else ("", "", name)
            count = int(number) if number else None
            gpu = gpu if gpu is not None and gpu.name == rest else self._gpu_named(rest)
        options = self._options.but(changes)
        return options, gpu, count, options.seq, options.concurrency or 1

    def _fits(self, flags: Flags) -> bool | None:
        """Whether it fits with the flags; None: the engine refuses them."""
        options, gpu, count, seq, concurrency = self._arguments(flags)
        try:
            return would_fit(
                self._spec, Resolver(options), gpu=gpu, gpu_count=count, seq=seq, concurrency=concurrency
            )
        except InputError:
            return None  # refused: no way out, and the next is tried

    def _serve(self, flags: Flags) -> Served:
        options, gpu, count, seq, concurrency = self._arguments(flags)
        return serve(
            self._spec, Resolver(options), gpu=gpu, gpu_count=count, seq=seq, concurrency=concurrency
        )

    def _try(self, flags: Flags) -> Served | None:
        return self._serve(flags) if self._fits(flags) is not None else None

    def _gpu_named(self, name: str) -> Gpu:
        return next(gpu for gpu in self._gpus() if gpu.name == name)

    # What it says

    def _suggestion(self, flags: Flags, served: Served, effect: str) -> Suggestion:
        capacity = served.capacity
        assert capacity is not None, "the caller gives a budget"
        return Suggestion(
            change=" ".join(_written(name, value) for name, value in flags.items()),
            effect=effect,
            flags=dict(flags),
            fits=capacity.fits,
            fits_confidence=capacity.fits_confidence,
            concurrent_sequences=capacity.concurrent_sequences,
            max_model_len_that_fits=capacity.max_model_len_that_fits,
        )

    def _effect(self, served: Served) -> str:
        capacity = served.capacity
        unsure = ", uncertain" if capacity is not None and capacity.fits_confidence == "uncertain" else ""
        return f"fits{unsure}: {self._sequences(served)}{self._on(served)}"

    def _sequences(self, served: Served) -> str:
        count = served.capacity.concurrent_sequences if served.capacity else 0
        return f"{counted(count, 'sequence')} of {counted(served.deployment.seq, 'token')}"

    def _on(self, served: Served) -> str:
        gpus = served.deployment.gpus
        return f" on {counted(gpus, 'GPU')}" if gpus != self._deployment.gpus else ""

    # Steps of each kind

    @property
    def _memory_decides(self) -> bool:
        """Whether the pool is what the budget leaves, not given."""
        return not self._deployment.pool_is_given

    def _utilizations(self, base: Flags) -> Sequence[Flags]:
        if not self._memory_decides:
            return ()
        hundredths = int(self._deployment.gpu_memory_utilization * 100 + 1e-9) + 1
        steps = range(hundredths, _HIGHEST_UTILIZATION + 1)
        if self._capacity.fits:
            steps = steps[-1:]
        return [{"gpu_memory_utilization": step / 100} for step in steps]

    def _batches(self, base: Flags) -> Sequence[Flags]:
        least = max(_FEWEST_BATCHED_TOKENS, self._options.max_num_seqs or 1)
        return self._halvings("max_num_batched_tokens", self._deployment.max_num_batched_tokens, least)

    def _seqs(self, base: Flags) -> Sequence[Flags]:
        if self._deployment.concurrency > self._deployment.max_num_seqs:
            return [{"max_num_seqs": self._deployment.concurrency}]
        least = max(_FEWEST_SEQS, self._deployment.concurrency)
        if self._capacity.fits:
            least = max(least, self._capacity.concurrent_sequences)
        return self._halvings("max_num_seqs", self._deployment.max_num_seqs, least)

    def _halvings(self, name: str, now: int, least: int) -> Sequence[Flags]:
        """Powers of two below ``now``, which measure less when the engine starts."""
        if not self._memory_decides:
            return ()
        largest = (now - 1).bit_length() - 1
        return [{name: 1 << power} for power in range(largest, -1, -1) if 1 << power >= least]

    def _eager(self, base: Flags) -> Sequence[Flags]:
        return () if self._deployment.enforce_eager or not self._memory_decides else [{"enforce_eager": True}]

    def _cache_dtypes(self, base: Flags) -> Sequence[Flags]:
        element_bytes = KV_DTYPE_BYTES.get(self._deployment.cache.kv_cache_dtype, 1)
        if element_bytes == 1 or not _has_fp8(self._served.gpu):
            return ()
        return [{"kv_cache_dtype": "fp8"}]

    def _quantizations(self, base: Flags) -> Sequence[Flags]:
        """Of weights that are not quantized, when they are loaded: 8 bits where the GPU has fp8, then 4."""
        if self._spec.weights.quantization is not None or self._options.quantization is not None:
            return ()
        methods = ("fp8", "bitsandbytes") if _has_fp8(self._served.gpu) else ("bitsandbytes",)
        return [{"quantization": method} for method in methods]

    def _tensor_ranks(self, base: Flags) -> Sequence[Flags]:
        now = self._deployment.tensor_parallel_size
        heads = self._spec.num_heads
        powers = [1 << power for power in range(1, _MOST_RANKS.bit_length())]
        others = [size for size in range(3, _MOST_RANKS) if heads % size == 0 and size not in powers]
        sizes = [size for size in (*powers, *others) if size > now and heads % size == 0]
        return [self._ranks(base, tensor=size) for size in sizes]

    def _stages(self, base: Flags) -> Sequence[Flags]:
        now = self._deployment.pipeline_parallel_size
        most = min(self._spec.num_layers, _MOST_STAGES)
        return [self._ranks(base, pipeline=size) for size in range(now + 1, most + 1)]

    def _ranks(self, base: Flags, *, tensor: int | None = None, pipeline: int | None = None) -> Flags:
        """The flags for other degrees of parallelism, with the number of GPUs where ``--gpu`` says one."""
        deployment, none_given = self._deployment, not self._options.has_degrees
        given = {
            name: base[name] for name in ("tensor_parallel_size", "pipeline_parallel_size") if name in base
        }
        if tensor is not None:
            given["tensor_parallel_size"] = tensor
        if pipeline is not None:
            given["pipeline_parallel_size"] = pipeline
        if self._count is None:
            return given
        sizes = {
            "tensor_parallel_size": deployment.tensor_parallel_size,
            "pipeline_parallel_size": deployment.pipeline_parallel_size,
        } | given
        total = deployment.data_parallel_size
        for size in sizes.values():
            assert isinstance(size, int)
            total *= size
        assert self._served.gpu is not None, "a count belongs to a GPU"
        gpu = {"gpu": f"{total}x{self._served.gpu.name}"}
        if none_given and set(given) == {"tensor_parallel_size"}:
            return gpu
        return {**(sizes if none_given else given), **gpu}

    def _larger_gpus(self, base: Flags) -> Sequence[Flags]:
        """GPUs with more memory, the smallest first; of equals, in the order of the catalogue."""
        now, budget = self._served.gpu, self._served.budget
        if now is None or budget is None or self._options.gpu_memory is not None or not self._memory_decides:
            return ()
        larger = [gpu for gpu in self._gpus() if (gpu.memory_bytes or 0) > budget.memory_bytes]
        larger.sort(key=lambda gpu: gpu.memory_bytes or 0)
        count = "" if self._count is None else f"{self._count}x"
        return [{"gpu": f"{count}{gpu.name}"} for gpu in larger]


def _has_fp8(gpu: Gpu | None) -> bool:
    """Whether the GPU computes in fp8: from compute capability 8.9 on, elsewhere where a rate is known."""
    if gpu is None:
        return True
    number = capability(gpu.compute_capability)
    return gpu.flops_fp8 is not None if number is None else number >= (8, 9)


def _written(name: str, value: object) -> str:
    return flag(name) if value is True else f"{flag(name)} {value}"
