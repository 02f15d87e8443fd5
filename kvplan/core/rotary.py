"""How large the tables of rotary positions are, which vLLM keeps on every rank beside the weights.

Each distinct rotary embedding has one table of cosines and sines, in the model's dtype, for every position that
the config allows, whatever ``--max-model-len`` says (vLLM 0.33, model_executor/layers/rotary_embedding: base.py
and yarn_scaling_rope.py; layers alike share a table by ``_ROPE_DICT``). It is part of what the engine prints as
taken by loading the model: 32 MiB for Llama-3.1, 2.5 GiB for Llama-4-Scout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvplan.core.architectures import Config, number
from kvplan.core.model import PositionScaling

#: Families whose positions are learned, relative, biases of attention, or none.
_WITHOUT = frozenset(
    {"bart", "bloom", "gpt2", "gpt_bigcode", "jamba", "kimi_linear", "mamba", "mamba2", "mpt"}
    | {"nemotron_h", "opt", "t5", "whisper"}
)
#: Families that rotate half of a head, whatever their config says.
_HALF = frozenset({"chatglm"})
_SETTINGS = ("rope_parameters", "rope_scaling")
_MAX_POSITIONS = 10**9


def position_scalings(config: Config) -> tuple[PositionScaling, ...]:
    """The kinds of rotary embedding that a config names, one for each kind of layer where it nests them."""
    found = []
    for settings in (value for name in _SETTINGS if isinstance(value := config.get(name), Mapping)):
        nested = [value for value in settings.values() if isinstance(value, Mapping)]
        for one in nested or [settings]:
            kind = _kind(one)
            if isinstance(kind, str):
                kind = "longrope" if kind == "su" else kind
                found.append(PositionScaling(kind, _factor(one) or 1.0, _original(one)))
    return tuple(dict.fromkeys(found))


def rotary_elements(family: str, config: Config) -> int:
    """Elements of all rotary tables of a model; 0 where it has none. ``config`` as for `weight_groups`."""
    if family in _WITHOUT:
        return 0
    elements = sum(_positions(config, settings) * size for size, settings in _tables(config))
    return elements // 2 if family in _HALF else elements


def _tables(config: Config) -> Iterator[tuple[int, Config]]:
    """The rotated part of a head, and the settings, of each table."""
    settings = next(
        (value for name in _SETTINGS if isinstance(value := config.get(name), Mapping)),
        {},
    )
    latent = number(config, "qk_rope_head_dim")
    head = latent or number(config, "head_dim")
    kinds = {kind: one for kind, one in settings.items() if isinstance(one, Mapping)}
    if kinds:
        # One for each kind of layer (Gemma-3, Gemma-4); Gemma-4's full layers have wider heads.
        for kind, one in kinds.items():
            wide = number(config, "global_head_dim") if kind == "full_attention" else 0
            yield wide or _rotated(head, one), one
        return
    size = head if latent else _rotated(head, {**config, **settings})
    yield size, settings
    if config.get("rope_local_base_freq") is not None or config.get("swa_rope_theta") is not None:
        yield size, {}  # sliding layers turn at another speed


def _rotated(head: int, settings: Config) -> int:
    """The part of a head that is rotated."""
    fixed = number(settings, "rotary_dim")
    if 0 < fixed <= head:
        return fixed
    for name in ("partial_rotary_factor", "rotary_pct"):
        share = settings.get(name)
        if isinstance(share, int | float) and 0 < share <= 1:
            return int(head * share)
    return head


def _positions(config: Config, settings: Config) -> int:
    """Rows of a table: YaRN stretches what the model was trained on, other kinds go by the config."""
    original, factor = _original(settings), _factor(settings)
    if _kind(settings) in ("yarn", "deepseek_yarn") and original and factor:
        return min(int(original * factor), _MAX_POSITIONS)
    return number(config, "max_position_embeddings")


def _kind(settings: Config) -> object:
    return settings.get("rope_type", settings.get("type"))


def _original(settings: Config) -> int | None:
    """Positions before they were stretched; None where a config states none, or no length."""
    stated = number(settings, "original_max_position_embeddings")
    return min(stated, _MAX_POSITIONS) if stated > 0 else None


def _factor(settings: Config) -> float | None:
    """By how much positions are stretched; None where that cannot be."""
    factor = settings.get("factor")
    return float(factor) if isinstance(factor, int | float) and 0 < factor < 1e6 else None
