"""Why a figure of an engine's start-up log is not ours: what could be otherwise is tried, one thing at a time.

A cause is named only where it was computed and makes the figure come out within what was printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvplan.core.gpu import Gpu
from kvplan.core.model import ModelSpec
from kvplan.core.sizing import Capacity
from kvplan.core.vllm_rules import RULE_CHANGES, nearest_rules, vllm_rules
from kvplan.errors import KvplanError
from kvplan.log_budget import own_sum
from kvplan.log_lines import Unit
from kvplan.options import Resolver, SizeOptions
from kvplan.serving import Served, serve
from kvplan.startup_log import Figure, StartupLog

#: Weights are alike within one part in this many.
_SAME_WEIGHTS = 100


class Derived(NamedTuple):
    """A figure that the engine derives from its KV memory: its name in the log, its term, unit, and ours."""

    name: str
    term: str
    unit: Unit
    ours: Callable[[Capacity], int | float]


DERIVED = (
    Derived("num_gpu_blocks", "blocks", "blocks", lambda plan: plan.num_gpu_blocks),
    Derived("kv_cache_tokens", "KV cache tokens", "tokens", lambda plan: plan.kv_cache_tokens),
    Derived("max_concurrency", "concurrency", "times", lambda plan: plan.max_concurrency),
    Derived("estimated_max_len", "longest that fits", "tokens", lambda plan: plan.max_model_len_that_fits),
)


class Case:
    """A log, the model, and the options that it amounts to; our plans with them and with changes to them."""

    def __init__(
        self, log: StartupLog, spec: ModelSpec, options: SizeOptions, gpu: Gpu | None, gpu_count: int | None
    ) -> None:
        """``gpu`` and ``gpu_count`` are those that ``options`` name. Raises `InputError` where the engine refuses."""
        self.log = log
        self.options = options
        self._spec, self._gpu, self._gpu_count = spec, gpu, gpu_count
        self.served = self._serve(options)
        self._served: dict[tuple[tuple[str, object], ...], Served | None] = {}

    def _serve(self, options: SizeOptions) -> Served:
        return serve(self._spec, Resolver(options), gpu=self._gpu, gpu_count=self._gpu_count)

    def with_changes(self, changes: Mapping[str, object]) -> Served | None:
        """Our plan with some options changed; None where the engine has no such setting or does not take it."""
        key = tuple(sorted(changes.items()))
        if key not in self._served:
            try:
                self._served[key] = self._serve(self.options.but(changes))
            except KvplanError:
                self._served[key] = None  # no cause then
        return self._served[key]

    def at(self, kv_bytes: int | float, changes: Mapping[str, object] | None = None) -> Capacity | None:
        """What we make of this memory for the KV cache; None where it cannot be computed."""
        served = self.with_changes({"kv_cache_memory_bytes": max(1, int(kv_bytes)), **(changes or {})})
        return served.capacity if served is not None else None

    def reaches(
        self, memory: Figure, derived: Derived, figure: Figure, changes: Mapping[str, object] | None = None
    ) -> bool:
        """Whether some memory that would be printed so gives the figure: it grows with the memory."""
        least, most = self.at(memory.low, changes), self.at(memory.high, changes)
        if least is None or most is None:
            return False
        return derived.ours(least) <= figure.high and figure.low <= derived.ours(most)

    def loaded(self, served: Served | None = None) -> tuple[int | None, ...]:
        """Bytes on a rank of each stage once the model is loaded: weights, rotary tables and LoRA slots."""
        return (served or self.served).plan.loaded()


class _Try(NamedTuple):
    changes: Mapping[str, object]
    cause: str


def _tries(case: Case) -> Iterator[_Try]:
    """What a log may not show and what changes a pool, one by one; likelier ones first."""
    options = case.options
    unshown: tuple[tuple[str, object, str], ...] = (
        (
            "async_scheduling",
            True,
            "asynchronous scheduling: more tokens in flight hold blocks of the windows",
        ),
        (
            "async_scheduling",
            False,
            "no asynchronous scheduling: fewer tokens in flight hold blocks of windows",
        ),
        ("enable_prefix_caching", False, "prefix caching is off"),
        ("enable_prefix_caching", True, "prefix caching is on"),
        ("kv_cache_dtype", "fp8", "the KV cache is in fp8"),
        ("kv_cache_dtype", "fp8_ds_mla", "the KV cache is in fp8 with packed latents"),
        ("disable_hybrid_kv_cache_manager", True, "the hybrid KV cache manager is off"),
        *(
            ("num_speculative_tokens", tokens, f"drafts of {tokens} token{'s' if tokens > 1 else ''}")
            for tokens in (1, 2, 3, 4)
        ),
        *(
            ("block_size", size, f"blocks of {size} tokens, as another attention backend has them")
            for size in (16, 32, 64, 128, 256)
        ),
        *(
            ("max_num_batched_tokens", tokens, f"steps of {tokens:,} tokens")
            for tokens in (2048, 4096, 8192, 16384, 32768)
        ),
    )
    for name, value, cause in unshown:
        if getattr(options, name) in (None, "auto"):
            yield _Try({name: value}, f"{cause}, though the log does not say so")
    if case.log.engine != "vllm":
        return
    for version, label in _other_rules(case.served.deployment.version):
        yield _Try({"engine": f"vllm@{version}"}, f"the rules of vLLM {label}")


def _pairs(case: Case) -> Iterator[_Try]:
    """Where a log does not tell its version: versions with what else it may not show."""
    options = case.options
    if case.log.engine != "vllm" or case.log.version is not None:
        return
    own = case.served.deployment.version
    cachings = ((None, ""), (False, "prefix caching off"), (True, "prefix caching on"))
    drafts: list[tuple[int | None, str]] = [(None, "")]
    if options.num_speculative_tokens is None:
        drafts += [(count, f"drafts of {count} token{'s' if count > 1 else ''}") for count in (1, 2, 3, 4)]
    for version, label in ((own, own), *_other_rules(own)):
        for caching, switched in cachings if options.enable_prefix_caching is None else cachings[:1]:
            for count, drafted in drafts:
                extras = [text for text in (switched, drafted) if text]
                if len(extras) + (version != own) < 2:
                    continue  # tried alone
                changes: dict[str, object] = {"engine": f"vllm@{version}"}
                changes |= {} if caching is None else {"enable_prefix_caching": caching}
                changes |= {} if count is None else {"num_speculative_tokens": count}
                yield _Try(changes, f"the rules of vLLM {label}, with {' and '.join(extras)}")


def _other_rules(ours: str) -> Iterator[tuple[str, str]]:
    """A version of each set of rules but our own, and the versions that have it."""
    newer: str | None = None
    for version in RULE_CHANGES:
        last = None if newer is None else f"0.{int(newer.split('.')[1]) - 1}"
        label = (
            f"from {version} on" if last is None else version if last == version else f"{version} to {last}"
        )
        if version != nearest_rules(ours).version:
            yield version, label
        newer = version


def pool_cause(case: Case, memory: Figure, derived: Derived, figure: Figure, plan: Capacity) -> str | None:
    """Why a figure is not what the printed memory gives; None if nothing that is tried gives it."""
    log = case.log
    for other in log.by_worker("kv_memory").values():
        if other is not memory and case.reaches(other, derived, figure):
            return f"another rank's memory: {_who(other)} printed {other.value:,} bytes (line {other.line})"
    override = log.settings.get("num_gpu_blocks_override")
    if override is not None and derived.name == "num_gpu_blocks" and figure.value == override.value:
        return f"num_gpu_blocks_override (line {override.line})"
    printed = [(one, theirs) for one in DERIVED if (theirs := log.last(one.name)) is not None]
    partly: str | None = None
    for changes, cause in _tries(case):
        if not case.reaches(memory, derived, figure, changes):
            continue
        if all(case.reaches(memory, one, theirs, changes) for one, theirs in printed):
            return cause  # it explains every figure
        partly = partly or cause
    if len(printed) > 1:  # one figure alone would be met by chance
        for changes, cause in _pairs(case):
            if all(case.reaches(memory, one, theirs, changes) for one, theirs in printed):
                return cause
    if partly is None and derived.unit in ("blocks", "tokens"):
        groups = case.served.kv.per_gpu.groups
        smallest = min((group.block_size for group in groups), default=1)
        step = 1 if derived.unit == "blocks" else smallest
        if figure.allows(derived.ours(plan) + step) or figure.allows(derived.ours(plan) - step):
            return "one block: the null block is counted on one side only"
    return partly


def needed_cause(case: Case, needed: Figure, ours: int) -> str | None:
    """Why another need is printed for the longest sequence than ours."""
    if needed.allows(ours):
        return None
    block = case.served.kv.per_gpu.bytes_per_block
    if needed.allows(ours + block) or needed.allows(ours - block):
        return "one block: the null block is counted on one side only"
    for changes, cause in _tries(case):
        served = case.with_changes(changes)
        if served is not None and needed.allows(needed_bytes(served)):
            return cause
    return None


def needed_bytes(served: Served) -> int:
    """Bytes of the longest sequence as the engine's check at the start adds them up.

    Until 0.18 it is the sum over layers, without padding (v1/core/kv_cache_utils.py ``max_memory_usage_bytes``).
    """
    kv = served.kv.per_gpu
    engine = served.engine
    older = engine.name == "vllm" and vllm_rules(engine.version).number < (0, 19)
    sizes = [group.page_bytes for group in kv.groups]
    if older and len(sizes) > 1 and served.deployment.pipeline_parallel_size == 1 and None not in sizes:
        return sum((group.page_bytes or 0) * group.layers * group.blocks_per_sequence for group in kv.groups)
    return kv.allocated_bytes_per_sequence


def nearest(sizes: Sequence[int | None], value: float) -> int | None:
    """The size that is closest; None where none is known."""
    known = [size for size in sizes if size is not None]
    return min(known, key=lambda size: abs(size - value)) if known else None


def weights_cause(case: Case, weights: Figure, ours: int) -> str | None:
    """Why the weights differ, beyond rounding."""
    if weights.allows(ours):
        return None
    if weights_agree(weights, ours):
        return "less than 1 %: buffers and the allocator's rounding"
    quantization = case.options.quantization
    tries = [
        _Try({"quantization": None}, f"they are held in {case.served.deployment.dtype}, not in {quantization}"),
        _Try({"quantization": "fp8"}, "the engine holds them in fp8"),
        _Try({"enable_expert_parallel": True}, "experts are shared out whole among the ranks"),
        _Try({"enable_expert_parallel": False}, "each expert is cut among the ranks"),
        _Try({"num_speculative_tokens": 1}, "layers that draft are loaded"),
        _Try({"num_speculative_tokens": None, "speculative_method": None, "speculative_model": None},
             "the draft is not counted in"),
        _Try({"enable_lora": None, "max_loras": None, "max_lora_rank": None}, "slots for LoRA are not counted in"),
        _Try({"dtype": "float32"}, "they are in float32"),
        _Try({"dtype": "bfloat16"}, "they are in bfloat16"),
    ]  # fmt: skip
    for changes, cause in tries:
        if all(getattr(case.options, name) == value for name, value in changes.items()):
            continue
        served = case.with_changes(changes)
        other = nearest(case.loaded(served), weights.value) if served is not None else None
        if other is not None and weights_agree(weights, other):
            return cause
    ranks = (case.options.tensor_parallel_size or 1) * (case.options.pipeline_parallel_size or 1)
    if ranks > 1 and weights_agree(weights, ours * ranks):
        return f"the whole model's, not those of one of {ranks} ranks"
    return None


def weights_agree(weights: Figure, ours: int) -> bool:
    """Whether weights are alike within a hundredth: engines count buffers and the allocator's rounding in."""
    return abs(weights.value - ours) * _SAME_WEIGHTS <= ours


def largest_part(case: Case, memory: Figure) -> str | None:
    """Which part's difference explains most of that of the memory for KV, if at least half."""
    plan, log = case.served.capacity, case.log
    overhead = plan.overhead_bytes if plan is not None else None
    if plan is None or overhead is None:
        return None
    weights = log.most("weights")
    parts = [
        ("weights", "weights", None if weights is None else nearest(case.loaded(), weights.value)),
        ("activations", "activations", overhead.activations),
        ("non_torch", "runtime", overhead.runtime),
    ]
    identity = own_sum(log)
    causes: list[tuple[float, str]] = []
    if identity is not None and identity.graphs == "":
        causes.append(
            (-overhead.cuda_graphs, "graph memory: this version does not take it from the budget, ours does")
        )
    else:
        name = identity.graphs if identity is not None and identity.graphs else "cuda_graphs_estimate"
        parts.append((name, "CUDA graphs", overhead.cuda_graphs))
    for name, term, ours in parts:
        theirs = log.most(name)
        if theirs is not None and ours is not None:
            apart = theirs.value - ours
            more = "more" if apart > 0 else "less"
            causes.append(
                (apart, f"mostly {term}: theirs is {abs(apart):,} bytes {more} (line {theirs.line})")
            )
    missing = plan.available_kv_bytes - memory.value  # where theirs takes more, less is left
    explaining = [cause for cause in causes if cause[0] * missing > 0 and abs(cause[0]) * 2 >= abs(missing)]
    return max(explaining, key=lambda cause: abs(cause[0]))[1] if explaining else None


def _who(figure: Figure) -> str:
    return figure.worker or "a process without a name"
