"""Groups, blocks and lengths of random layer mixes, by vLLM's own planning code and by kvplan.

Usage: python benchmarks/check_against_vllm.py FOLDER [--count 2000] [--seed 0] [--record FILE --keep 40]

FOLDER is an unpacked wheel of vLLM (0.11 to 0.33). Its kv_cache_interface.py, kv_cache_planning.py and
kv_cache_utils.py are run as they are, with stand-ins for torch and for all that planning does not call. Each mix of
layers, parallelism and settings is planned by both; figures that differ are printed. ``--record`` writes mixes and
vLLM's figures as JSON, which tests/golden/test_vllm_plans.py holds kvplan to.

What may differ, and why no model shows it:

* latents of two widths: until 0.32 vLLM gives all of them the first one's width (``MLAAttentionSpec.merge``); so too
  values of two widths where windows keep all tokens;
* DeepSeek-V4 with the hybrid manager off: before 0.33 it is planned, in 0.33 it fails with a TypeError; kvplan refuses;
* DeepSeek-V4 before 0.33: the check at the start takes blocks to be larger than they are and counts in bytes, kvplan
  in blocks: the longest length may be one block off.
* A stage without room for a block: with the check at the start passed over, old versions then divide by zero.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import random
import re
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kvplan.core.deployment import Deployment, pipeline_stages
from kvplan.core.kv_cache import (
    HEADS,
    KINDS,
    STATES,
    CacheFormat,
    ChunkedLocal,
    CompressedIndexer,
    CompressedLatent,
    CompressorState,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LatentWindow,
    LayerCache,
    SlidingWindow,
    SparseIndexer,
    describe,
    kv_heads_per_rank,
)
from kvplan.core.kv_pool import VllmPool
from kvplan.core.model import ModelSpec
from kvplan.core.sizing import Budget, Plan, plan_capacity
from kvplan.core.weights import Weights
from kvplan.errors import InputError

#: Modules that are run as they are.
OWN = {
    f"vllm.{name}"
    for name in (
        "utils.math_utils",
        "v1.kv_cache_interface",
        "v1.kv_cache_layout",
        "v1.kv_cache_spec_registry",
        "v1.core.kv_cache_config_builder",
        "v1.core.kv_cache_planning",
        "v1.core.kv_cache_utils",
    )
}
#: How vLLM's planning says that it cannot plan a mix, read in its files: ``unify_hybrid_kv_cache_specs`` and ``merge``
#: (ValueError), ``unify_kv_cache_spec_page_size`` (NotImplementedError, and an assertion in 0.19 to 0.24); until 0.26 a
#: stage without a block divides by zero. Each is a result of the comparison, not an error of this script.
REFUSALS = (AssertionError, NotImplementedError, ValueError, ZeroDivisionError)
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "float8_e4m3fn": 1}
LONGEST = 2_000_000


# Stand-ins


class Anything:
    """Stands for whatever planning names and never uses."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> object:
        """As a decorator: what is decorated."""
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __or__(self, other: object) -> Anything:
        return self

    __ror__ = __getitem__ = __or__

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return ()


class Dtype:
    """A dtype of torch: a name and its bytes."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size


TORCH = {name: Dtype(name, size) for name, size in DTYPES.items()}


class StandIn(ModuleType):
    """A module with whatever is asked of it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's planning modules in a folder, and stand-ins for all else of vLLM and torch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        """Where a module comes from."""
        if fullname.partition(".")[0] not in ("torch", "vllm", "cloudpickle", "prometheus_client"):
            return None
        file = self.folder / f"{fullname.replace('.', '/')}.py"
        if fullname in OWN and file.exists():
            return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        """A stand-in."""
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give a stand-in what planning does call."""
        quiet = SimpleNamespace(
            **dict.fromkeys(("info", "info_once", "warning", "warning_once", "debug"), lambda *_, **__: None)
        )
        parts = {
            "torch": {**TORCH, "dtype": Dtype, "Tensor": object, "device": object},
            "vllm.logger": {"init_logger": lambda name: quiet},
            "vllm.utils": {"get_dtype_size": lambda dtype: dtype.size, "cdiv": lambda a, b: -(-a // b)}
            | {"GiB_bytes": 1 << 30},
            "vllm.utils.torch_utils": {
                "get_dtype_size": lambda dtype: dtype.size,
                "nvfp4_kv_cache_full_dim": lambda size: size // 2 + size // 16,
            },
            "vllm.utils.mem_utils": {"format_gib": lambda size: f"{size / (1 << 30):.2f}"},
            "vllm.v1.attention.backend": {"MultipleOf": type("MultipleOf", (), {})},
            "vllm.v1.hisparse.layout": {"get_hisparse_kv_cache_groups": lambda *_: None},
            "vllm.utils.import_utils": {"resolve_obj_by_qualname": self._builder},
        }
        vars(module).update(parts.get(module.__name__, {}))

    @staticmethod
    def _builder(name: str) -> Any:
        return sys.modules["vllm.v1.core.kv_cache_planning"].DefaultKVCacheConfigBuilder


class Vllm:
    """The planning code of one version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        text = (folder / "vllm/_version.py").read_text(encoding="utf-8")
        found = re.search(r"version = '(\d+)\.(\d+)", text)
        if not found:
            raise SystemExit(f"{folder}: vllm/_version.py names no version")
        self.number = (int(found.group(1)), int(found.group(2)))
        sys.meta_path.insert(0, Finder(self.folder))
        self.specs: Any = importlib.import_module("vllm.v1.kv_cache_interface")
        self.utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
        self.plan: Any = self.utils
        if self.number >= (0, 33):
            self.plan = importlib.import_module("vllm.v1.core.kv_cache_planning")
        registry: Any = importlib.import_module("vllm.v1.kv_cache_spec_registry")
        if self.number >= (0, 24):
            bases = {"MLAAttentionSpec": "FullAttentionSpec"}
            words = "FullAttention SlidingWindow SlidingWindowMLA Mamba ChunkedLocalAttention CrossAttention"
            for name in (f"{word}Spec" for word in [*words.split(), "MLAAttention"]):
                registry.KVCacheSpecRegistry.register(
                    getattr(self.specs, name),
                    object,
                    uniform_type_base_spec=getattr(self.specs, bases.get(name, name)),
                )

    def raised(self, error: BaseException) -> bool:
        """Whether vLLM's own files raised it, rather than this script or a stand-in."""
        *_, innermost = traceback.extract_tb(error.__traceback__)
        return Path(innermost.filename).is_relative_to(self.folder)

    def spec(self, cache: Any, pool: VllmPool, deployment: Deployment, padded: int | None) -> Any:
        """The spec that vLLM's layers make of a cache."""
        form, specs, newest = deployment.cache, self.specs, self.number >= (0, 33)
        common: dict[str, Any] = {"block_size": pool.block_size, "num_kv_heads": 1, "dtype": TORCH["uint8"]}
        if form.kv_cache_dtype in TORCH or form.kv_cache_dtype == "fp8":
            common["dtype"] = TORCH.get(form.kv_cache_dtype, TORCH["float8_e4m3fn"])
        if (0, 24) <= self.number < (0, 33):
            common["indexes_kv_by_block_stride"] = not isinstance(cache, SparseIndexer)
        if isinstance(cache, HEADS):
            common |= {
                "num_kv_heads": kv_heads_per_rank(cache.num_kv_heads, form.tensor_parallel_size),
                "head_size": cache.head_dim,
            }
            if getattr(cache, "value_head_dim", None) is not None:
                common["head_size_v"] = cache.value_size
            if form.kv_cache_dtype == "int8_per_token_head":
                content = cache.head_dim + cache.value_size + 8
                quantized = {"state_content_bytes": content}
                mode = {} if newest else {"kv_quant_mode": specs.get_kv_quant_mode(form.kv_cache_dtype)}
                common |= quantized if newest else mode
        if isinstance(cache, FullAttention):
            return specs.FullAttentionSpec(**common)
        if isinstance(cache, SlidingWindow):
            return specs.SlidingWindowSpec(**common, sliding_window=cache.window)
        if isinstance(cache, ChunkedLocal):
            return specs.ChunkedLocalAttentionSpec(**common, attention_chunk_size=cache.chunk)
        if isinstance(cache, CrossAttention):
            return specs.CrossAttentionSpec(**common)
        if isinstance(cache, STATES):
            more: dict[str, Any] = {}
            if self.number >= (0, 19):
                more = {"mamba_cache_mode": pool.state_mode}
                more["num_speculative_blocks"] = form.num_speculative_tokens
            if newest:
                more["num_prefill_checkpoint_blocks"] = int(cache.kind in pool.checkpointed)
            return specs.MambaSpec(
                block_size=deployment.max_model_len if pool.state_mode == "none" else pool.block_size,
                shapes=((cache.page_bytes(1, form),),),
                dtypes=(TORCH["uint8"],),
                page_size_padded=padded,
                **more,
            )
        packed = form.kv_cache_dtype == "fp8_ds_mla"
        if isinstance(cache, LatentAttention):
            common |= {"head_size": cache.kv_lora_rank + cache.qk_rope_head_dim}
            if packed and newest:
                common["state_content_bytes"] = 656
            return specs.MLAAttentionSpec(**common, cache_dtype_str=form.kv_cache_dtype)
        if isinstance(cache, SparseIndexer):
            row = cache.page_bytes(1, form)
            return specs.MLAAttentionSpec(**common | {"head_size": row, "dtype": TORCH["uint8"]})
        return self._v4_spec(cache, common)

    def _v4_spec(self, cache: Any, common: dict[str, Any]) -> Any:
        """DeepSeek-V4's caches (models/deepseek_v4), packed."""
        specs, newest = self.specs, self.number >= (0, 33)
        common |= {"alignment": 576}
        latent = {"head_size": 512, "cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
        if newest:
            latent["state_content_bytes"] = 584
        ratio = "tokens_per_state" if newest else "compress_ratio"
        if isinstance(cache, CompressedLatent):
            return specs.MLAAttentionSpec(**common, **latent, **{ratio: cache.tokens_per_state})
        if isinstance(cache, CompressedIndexer):
            row = cache.index_head_dim + cache.index_head_dim // 128 * 4
            return specs.MLAAttentionSpec(**common, head_size=row, **{ratio: cache.tokens_per_state})
        common["block_size"] = cache.own_block_size
        if isinstance(cache, LatentWindow):
            return specs.SlidingWindowMLASpec(**common, **latent, sliding_window=cache.window)
        overlap = 2 if cache.tokens_per_state == 4 else 1
        common["dtype"] = TORCH["float32"]
        return specs.SlidingWindowMLASpec(
            **common, head_size=2 * overlap * cache.head_dim, sliding_window=cache.window
        )

    def figures(self, model: ModelSpec, deployment: Deployment, pool: VllmPool) -> dict[str, Any]:
        """What vLLM plans. Raises what it raises for what it cannot."""
        config = self._config(model, deployment, pool)
        items = [*model.layers, *deployment.drafts]
        first = next(
            (i.cache for i in model.layers if isinstance(i.cache, (FullAttention, LatentAttention))), None
        )
        attention_page = first.page_bytes(pool.block_size, deployment.cache) if first else 0
        workers: list[dict[str, Any]] = []
        for stage in pipeline_stages(model.num_layers, deployment.pipeline_parallel_size):
            worker = {}
            for i, item in enumerate(items):
                state = isinstance(item.cache, STATES)
                padded = state and attention_page > item.cache.page_bytes(1, deployment.cache)
                if stage.holds(item.layer):
                    worker[str(i)] = self.spec(
                        item.cache, pool, deployment, attention_page if padded else None
                    )
            workers.append(worker)
        memory = [deployment.kv_cache_memory_bytes] * len(workers)
        merged = {name: spec for worker in workers for name, spec in worker.items()}
        groups, more = None, []
        if self.number >= (0, 33):
            groups = self.plan.get_global_kv_cache_groups(config, workers)
            more = [groups]
        else:
            groups = self.plan.get_kv_cache_groups(config, dict(merged))
        found: dict[str, Any] = {"groups": [self._group(group) for group in groups]}
        found["starts"], configs = True, None
        try:
            configs = self.plan.get_kv_cache_configs(config, workers, memory, *more)
        except ValueError as error:
            if not re.match("To serve|No available", str(error)):
                raise
            found["starts"] = False
            config = self._config(model, deployment, pool)  # 0.11 leaves its estimate in the settings
            name = (
                "_check_enough_kv_cache_memory" if self.number >= (0, 19) else "check_enough_kv_cache_memory"
            )
            check = getattr(self.plan, name)
            setattr(self.plan, name, lambda *_: None)
            try:
                configs = self.plan.get_kv_cache_configs(config, workers, memory, *more)
            finally:
                setattr(self.plan, name, check)
        found["num_blocks"] = configs[0].num_blocks
        if groups and configs[0].num_blocks:
            found["tokens"], found["concurrency"] = self._line(config, configs[0], deployment)
        if self.number < (0, 19):
            del found["starts"]  # counted by layer, without the padding that the groups add
            return found
        projected = [self.plan._project_kv_cache_groups_to_worker(groups, worker) for worker in workers]
        found["bytes_per_block"] = [self._bytes_per_block(config, one) for one in projected]
        if deployment.num_gpu_blocks_override is not None:
            memory = [deployment.num_gpu_blocks_override * size for size in found["bytes_per_block"]]
        found["longest"] = self._longest(config, projected, memory, found["bytes_per_block"])
        return found

    def _group(self, group: Any) -> list[Any]:
        """Its layers, the tokens of a block and the bytes of each layer's page."""
        spec = group.kv_cache_spec
        of_layer = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
        pages = [of_layer[name].page_size_bytes for name in group.layer_names]
        return [[int(name) for name in group.layer_names], of_layer[group.layer_names[0]].block_size, pages]

    def _line(self, config: Any, planned: Any, deployment: Deployment) -> tuple[int, float]:
        length = deployment.max_model_len
        if self.number >= (0, 24):
            return self.utils.get_kv_cache_capacity(config, planned)
        concurrency = self.utils.get_max_concurrency_for_kv_cache_config(config, planned)
        if self.number >= (0, 21):
            return int(concurrency * length), concurrency
        smallest = min(group.kv_cache_spec.block_size for group in planned.kv_cache_groups)
        tokens = planned.num_blocks // len(planned.kv_cache_groups) * smallest
        return tokens * deployment.cache.decode_context_parallel_size, concurrency

    def _bytes_per_block(self, config: Any, groups: list[Any]) -> int:
        if not groups:
            return 0
        if self.number >= (0, 24):
            return self.plan._pool_bytes_per_block(config, groups)
        if self.number >= (0, 21):
            return self.plan._pool_bytes_per_block(groups)
        if len(groups) == 1 and hasattr(groups[0].kv_cache_spec, "kv_cache_specs"):
            return groups[0].kv_cache_spec.page_size_bytes
        page = self.plan.get_uniform_page_size([group.kv_cache_spec for group in groups])
        return page * max(len(group.layer_names) for group in groups)

    def _longest(self, config: Any, projected: list[Any], memory: Sequence[Any], blocks: list[int]) -> int:
        config.model_config.max_model_len = LONGEST
        estimate, found = self.plan._estimate_max_model_len_from_groups, LONGEST
        for groups, size, block in zip(projected, memory, blocks, strict=True):
            if self.number >= (0, 33):
                builder = self.plan.DefaultKVCacheConfigBuilder()
                found = min(found, estimate(builder, config, groups, size - block))
            else:
                found = min(found, estimate(config, groups, size))
        return found

    def _config(self, model: ModelSpec, deployment: Deployment, pool: VllmPool) -> Any:
        form, length = deployment.cache, deployment.max_model_len
        packed = any(isinstance(item.cache, LatentWindow) for item in model.layers)
        layout = getattr(self.specs, "KVCacheLayout", {"BLHNC": None, "LBNHC": None})
        extra = pool.extra_tokens
        return SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=length, original_max_model_len=length, supports_kv_cache_grouping=False
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=form.decode_context_parallel_size,
                prefill_context_parallel_size=1,
                tensor_parallel_size=form.tensor_parallel_size,
            ),
            scheduler_config=SimpleNamespace(
                max_num_batched_tokens=deployment.max_num_batched_tokens,
                max_num_encoder_input_tokens=deployment.max_num_batched_tokens,
                disable_hybrid_kv_cache_manager=not deployment.hybrid_kv_cache_manager,
            ),
            cache_config=SimpleNamespace(
                num_gpu_blocks_override=deployment.num_gpu_blocks_override,
                mamba_cache_mode=pool.state_mode,
                prefix_cache_retention_interval=None,
                get_resolved_kv_cache_layout=lambda: layout["BLHNC" if packed else "LBNHC"],
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
            kv_transfer_config=None,
            speculative_config=None,
            max_in_flight_tokens=pool.tokens_in_flight,
            num_prefill_lookahead_tokens=extra + 1 if extra else 0,
        )


# Kvplan's side, which the test shares


def model_of(case: dict[str, Any]) -> tuple[ModelSpec, Deployment]:
    """The model and deployment of a case."""
    caches = [
        KINDS[entry["kind"]](**{name: value for name, value in entry.items() if name != "kind"})
        for entry in case["caches"]
    ]
    layers = [LayerCache(layer, caches[i]) for layer, i in case["layers"]]
    model = ModelSpec(
        name="mix",
        family="mix",
        architecture="mix",
        num_layers=case["num_layers"],
        hidden_size=64,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=1000,
        max_position_embeddings=LONGEST,
        dtype="bfloat16",
        layers=tuple(item for item in layers if item.layer < case["num_layers"]),
        weights=Weights(0, "config"),
        source="a mix",
    )
    deployment = Deployment(
        seq=case["settings"]["max_model_len"],
        version=case["version"],
        cache=CacheFormat(dtype="bfloat16", **case["form"]),
        drafts=tuple(item for item in layers if item.layer >= case["num_layers"]),
        **case["settings"],
    )
    return model, deployment


def kvplan_figures(model: ModelSpec, deployment: Deployment, pool: VllmPool) -> dict[str, Any]:
    """What kvplan plans, in the form of `Vllm.figures`."""
    plan = Plan(model, deployment, VllmPool)
    capacity = plan_capacity(plan, Budget(None, ()))
    at: dict[int, list[int]] = {}
    for i, item in enumerate((*model.layers, *deployment.drafts)):
        at.setdefault(item.layer, []).append(i)
    caches = [item.cache for item in (*model.layers, *deployment.drafts)]
    groups = []
    for group in pool.page_groups:
        members = []
        for page in group.pages:
            # A window that keeps all tokens has become full attention.
            ways = [i for i in at[page.layer] if type(caches[i]) is type(page.cache)] or at[page.layer]
            exact = [i for i in ways if caches[i] == page.cache] or ways
            members.append(exact[0])
            at[page.layer].remove(members[-1])
        groups.append([members, group.block_size, [page.page_bytes for page in group.pages]])
    return {
        "groups": groups,
        "starts": pool.blocks(deployment.max_model_len) <= pool.start_check_blocks(capacity.num_gpu_blocks),
        "num_blocks": capacity.num_gpu_blocks,
        "tokens": capacity.kv_cache_tokens,
        "concurrency": capacity.max_concurrency,
        "bytes_per_block": [pool.bytes_per_block(stage) for stage in plan.stages],
        "longest": capacity.max_model_len_that_fits,
    }


# Random mixes

FAMILIES = {
    "plain": ["full", "mla"],
    "window": ["full", "sliding_window"],
    "windows": ["full", "sliding_window", "sliding_window"],
    "only windows": ["sliding_window"],
    "latents and windows": ["mla", "sliding_window"],
    "sparse": ["mla", "indexer"],
    "hybrid": ["full", "state"],
    "latent hybrid": ["mla", "state"],
    "window hybrid": ["full", "sliding_window", "state"],
    "states": ["state"],
    "cross": ["full", "cross"],
    "chunks": ["full", "chunked_local"],
    "v4": [],
}


def random_cache(rng: random.Random, kind: str) -> Any:
    """A cache of a kind, or of some kind of state."""
    heads, size = rng.choice([1, 2, 4, 8, 16, 32]), rng.choice([64, 80, 96, 128, 192, 256, 512])
    if kind == "state":
        kind = rng.choice(["gated_delta_net", "mamba2", "linear_attention", "short_conv"])
    few = rng.choice([8, 64, 128, 384])
    made = {
        "full": lambda: FullAttention(heads, size),
        "sliding_window": lambda: SlidingWindow(heads, size, rng.choice([128, 512, 1024, 4096])),
        "chunked_local": lambda: ChunkedLocal(heads, size, rng.choice([1024, 8192])),
        "cross": lambda: CrossAttention(heads, size, 1500),
        "mla": lambda: LatentAttention(512, 64),
        "indexer": lambda: SparseIndexer(128),
        "gated_delta_net": lambda: KINDS[kind](16, 128, few, 128, 4, rng.choice([None, "float32"])),
        "mamba2": lambda: KINDS[kind](few, 64, 128, 8, 4),
        "linear_attention": lambda: KINDS[kind](few, 128),
        "short_conv": lambda: KINDS[kind](128 * few, 3),
    }
    return made[kind]()


def random_layers(rng: random.Random, family: str, count: int) -> list[LayerCache]:
    """The caches of as many layers: a repeated pattern, or any order."""
    if family == "v4":
        found = []
        for i in range(count):
            ratio = 0 if i < 2 else (4, 128)[i % 2]
            if ratio:
                found.append(LayerCache(i, CompressedLatent(512, ratio)))
            found.append(LayerCache(i, LatentWindow(512, 128)))
            if ratio == 4:
                found += [LayerCache(i, CompressedIndexer(128, 4)), LayerCache(i, CompressorState(128, 4))]
            if ratio:
                found.append(LayerCache(i, CompressorState(512, ratio)))
        return found
    palette = [random_cache(rng, kind) for kind in FAMILIES[family]]
    if rng.random() < 0.5:
        heads, size = rng.choice([2, 4, 8]), rng.choice([64, 128, 256])
        palette = [
            cache._replace(num_kv_heads=heads, head_dim=size) if isinstance(cache, HEADS) else cache
            for cache in palette
        ]
    if family in ("sparse", "cross"):
        return [LayerCache(i, cache) for i in range(count) for cache in palette]
    period, mixed = rng.choice([2, 3, 4, 6]), rng.random() < 0.4
    rest = palette[1:] or palette
    return [
        LayerCache(
            i,
            rng.choice(palette) if mixed else palette[0] if i % period == period - 1 else rest[i % len(rest)],
        )
        for i in range(count)
    ]


def random_case(rng: random.Random, number: tuple[int, int]) -> dict[str, Any]:
    """A mix with its settings, as JSON has it."""
    family = rng.choice([name for name in FAMILIES if name != "v4" or number >= (0, 21)])
    layers = rng.choice([1, 2, 3, 5, 8, 12, 13, 24])
    layers = max(layers, 8) if family == "v4" else layers
    items = random_layers(rng, family, layers)
    tensor, drafts, dtype = rng.choice([1, 1, 2, 4, 8]), 0, rng.choice(["bfloat16", "bfloat16", "fp8"])
    if family == "v4" or (family == "sparse" and rng.random() < 0.5):
        dtype = "fp8_ds_mla"
    elif family in ("window", "only windows") and rng.random() < 0.2 and number >= (0, 24):
        dtype = "int8_per_token_head"
    if rng.random() < 0.2 and family != "v4":
        drafts = rng.choice([1, 2])
        draft = rng.choice([items[-1].cache, FullAttention(8, 128)])
        draft = draft if dtype != "fp8_ds_mla" else items[-1].cache
        items += [LayerCache(layers + i, draft) for i in range(drafts)]
    tokens = rng.choice([1, 2, 3]) if drafts else rng.choice([0, 0, 1, 3])
    contexts = 2 if family in ("plain", "sparse") and tensor > 1 and rng.random() < 0.4 else 1
    batch = rng.choice([512, 2048, 8192])
    distinct = list(dict.fromkeys((item.cache.kind, item.cache) for item in items))
    return {
        "version": ".".join(map(str, number)),
        "family": family,
        "num_layers": layers,
        "caches": [describe(cache) for _, cache in distinct],
        "layers": [[item.layer, distinct.index((item.cache.kind, item.cache))] for item in items],
        "form": {
            "kv_cache_dtype": dtype,
            "tensor_parallel_size": tensor,
            "decode_context_parallel_size": contexts,
            "num_speculative_tokens": tokens,
            "encoder_tokens": batch,
        },
        "settings": {
            "max_model_len": rng.choice([100, 1000, 4096, 8191, 32768, 131072, 1_000_000]),
            # More stages would leave the first without any of DeepSeek-V4's latents.
            "pipeline_parallel_size": rng.choice([1, 2])
            if family == "v4"
            else min(layers, rng.choice([1, 1, 2, 3])),
            "block_size": 256 if family == "v4" else rng.choice([16, 16, 32, 64]),
            "max_num_batched_tokens": batch,
            "enable_prefix_caching": rng.random() < 0.5,
            "async_scheduling": rng.random() < 0.7,
            # Beside drafts, and in old versions always, the engine turns its manager off for chunks.
            "hybrid_kv_cache_manager": (family != "chunks" or (number >= (0, 19) and not drafts))
            and (family == "v4" or rng.random() < 0.85),
            "speculative_method": None if not tokens else "mtp" if drafts else "ngram",
            "compute_capability": rng.choice(["8.0", "9.0", "10.0"]),
            "kv_cache_memory_bytes": int(2 ** rng.uniform(26, 38)),
            "num_gpu_blocks_override": rng.choice([None] * 6 + [50, 3000]) if number >= (0, 21) else None,
        },
    }


def compare(vllm: Vllm, case: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """How a case went, and vLLM's figures where it has any."""
    model, deployment = model_of(case)
    refused = None
    try:
        pool = VllmPool(model, deployment)
        ours = kvplan_figures(model, deployment, pool)
    except InputError as error:
        refused = error
    try:
        if refused is not None:
            # A view of the model refuses less: what is needed of the settings to ask vLLM.
            pool = VllmPool(model, deployment._replace(hybrid_kv_cache_manager=True), deployment.cache)
        found = vllm.figures(model, deployment, pool)
    except InputError:
        return "heads or states that the ranks do not divide", None
    except REFUSALS as error:
        if not vllm.raised(error):
            raise
        return ("both refuse" if refused else f"vLLM alone refuses: {error!r}"), None
    if refused is not None:
        return f"kvplan alone refuses: {refused}", None
    different = [name for name, value in found.items() if value != ours[name]]
    return (f"differs in {', '.join(different)}" if different else "equal"), found


def main() -> None:
    """Compare, print what differs and count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--keep", type=int, default=40)
    options = parser.parse_args()
    vllm, counts, kept = Vllm(options.folder), Counter[str](), []
    for seed in range(options.seed, options.seed + options.count):
        case = random_case(random.Random(seed), vllm.number)
        verdict, found = compare(vllm, case)
        counts[verdict.partition(":")[0]] += 1
        if verdict.startswith(("differs", "vLLM", "kvplan")):
            print(f"seed {seed}, {case['family']}: {verdict}")
        elif found is not None and len(kept) < options.keep:
            kept.append(case | {"expected": found})
    print(f"vLLM {vllm.number[0]}.{vllm.number[1]}: {dict(counts)}")
    if options.record:
        options.record.write_text(
            "[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in kept) + "\n]\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
