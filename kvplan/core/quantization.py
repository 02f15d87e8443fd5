"""How quantized weights are held: the bytes of a matrix in each format, and which matrices are quantized.

`from_config` reads a checkpoint's ``quantization_config``, `from_name` what ``--quantization`` asks for.
Formats are those of vLLM 0.33, model_executor/layers/quantization, as its GPUs hold them when loading is done:
kernels such as Marlin, Machete and CUTLASS shuffle the elements of a matrix and its scales without changing how
many there are, but for padding of sizes that are no multiple of their tiles (64 to 256), which is counted where
every kernel does it and left out where it depends on the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvplan.core.name_patterns import Patterns, plain_path
from kvplan.errors import InputError, quoted

#: A quantized one of these is kept a second time in the model's dtype, for the absorbed products of latent
#: attention (vLLM 0.33, model_executor/layers/attention/mla_attention.py, split_kv_b_proj).
_KEPT_UNPACKED = ".self_attn.kv_b_proj"


class Scheme(NamedTuple):
    """How a quantized matrix is held: ``bits`` a weight, and a scale for each block of it.

    A block of 0 rows or columns is all of them. ``zero_bits`` is held with each scale. ``round_rows`` and
    ``round_columns`` are what the sizes are padded to.
    """

    bits: int
    block_rows: int = 1
    block_columns: int = 0
    #: Bytes of one scale; None: an element of the model's dtype.
    scale_bytes: int | None = 4
    zero_bits: int = 0
    #: Scales of the whole matrix.
    matrix_bytes: int = 0
    #: What is kept for each input, such as the order of columns.
    input_bytes: int = 0
    round_rows: int = 1
    round_columns: int = 1
    #: Scales alone are padded to these multiples, for tensor cores that read them in tiles.
    tile_rows: int = 1
    tile_columns: int = 1
    #: Bits of the numbers that tensor cores multiply: 16 where weights are unpacked before, 8 where inputs are
    #: quantized too (NVFP4 on GPUs that have it: 4, counted as 8).
    operand_bits: int = 16

    def bytes_of(self, rows: int, columns: int, element_bytes: int) -> int:
        """Bytes of a matrix of ``rows`` outputs and ``columns`` inputs; ``element_bytes`` of the model's dtype."""
        rows, columns = _round_up(rows, self.round_rows), _round_up(columns, self.round_columns)
        down, across = _blocks(rows, self.block_rows), _blocks(columns, self.block_columns)
        scales = _round_up(down, self.tile_rows) * _round_up(across, self.tile_columns)
        scale = element_bytes if self.scale_bytes is None else self.scale_bytes
        return (
            _ceil_div(rows * columns * self.bits, 8)
            + scales * scale
            + _ceil_div(scales * self.zero_bits, 8)
            + self.matrix_bytes
            + columns * self.input_bytes
        )


class Rule(NamedTuple):
    """Modules that some patterns name, and how they are held; None: in the model's dtype."""

    patterns: Patterns
    scheme: Scheme | None


class Quantization(NamedTuple):
    """Which matrices of a model are quantized, and how.

    The first of ``rules`` that names a module decides; else it is ``linear`` or ``experts`` by its kind.
    ``unknown`` says why the bytes cannot be known, where they cannot.
    """

    method: str
    linear: Scheme | None = None
    experts: Scheme | None = None
    rules: tuple[Rule, ...] = ()
    unknown: str | None = None

    def scheme(self, name: str) -> Scheme | None:
        """How the linear layer of that path is held; None: in the model's dtype."""
        return self._of(name, self.linear)

    def head_scheme(self, name: str) -> Scheme | None:
        """How the vocabulary's head is held, which only a rule quantizes."""
        return self._of(name, None)

    def expert_scheme(self, name: str, *, is_down: bool) -> Scheme | None:
        """How a matrix of an expert is held, up (or gate) or down, with the padding that kernels of MXFP4 want."""
        scheme = self._of(name, self.experts)
        if scheme != _MXFP4:
            return scheme
        rows, columns = (_HIDDEN_TILE, _WIDTH_TILE) if is_down else (_WIDTH_TILE, _HIDDEN_TILE)
        return _MXFP4._replace(round_rows=rows, round_columns=columns)

    def keeps_unpacked(self, name: str) -> bool:
        """Whether a quantized module is held in the model's dtype as well."""
        return name.endswith(_KEPT_UNPACKED)

    def _of(self, name: str, default: Scheme | None) -> Scheme | None:
        path = plain_path(name)
        for rule in self.rules:
            if rule.patterns.match(path):
                return rule.scheme
        return default


_FP8_TENSOR = Scheme(8, block_rows=0, operand_bits=8)
_FP8_ROW = Scheme(8, operand_bits=8)
_FP8_BLOCK = Scheme(8, block_rows=128, block_columns=128, operand_bits=8)
_MXFP8 = Scheme(8, block_columns=32, scale_bytes=1, operand_bits=8)
_INT8_ROW = Scheme(8)
#: E2M1 with an E4M3 scale for 16, in tiles of 128 x 4 scales, and two scales of the whole, of weights and inputs
#: (quantization/utils/nvfp4_utils.py, swizzle_blockscale).
_NVFP4 = Scheme(
    4, block_columns=16, scale_bytes=1, matrix_bytes=8, tile_rows=128, tile_columns=4, operand_bits=8
)
#: E2M1 with a power of two for 32 (OCP MX).
_MXFP4 = Scheme(4, block_columns=32, scale_bytes=1)
#: Expert sizes are padded as Marlin, FlashInfer's TRT-LLM kernels and CUTLASS want them
#: (fused_moe/oracle/mxfp4.py, mxfp4_round_up_hidden_size_and_intermediate_size; Triton on Hopper pads less).
_HIDDEN_TILE, _WIDTH_TILE = 256, 128
#: bitsandbytes: a float32 maximum for each 64 weights, once vLLM has unpacked a nested one.
_BNB4_BLOCK = 64


def from_name(name: str) -> Quantization:
    """What ``--quantization NAME`` makes of a checkpoint that is not quantized (vLLM config/quantization.py)."""
    online = {
        "fp8": (_FP8_TENSOR, _FP8_TENSOR),
        "fp8_per_tensor": (_FP8_TENSOR, _FP8_TENSOR),
        "fp8_per_block": (_FP8_BLOCK, _FP8_BLOCK),
        "fp8_per_channel": (_FP8_ROW, _FP8_ROW),
        "ptpc_fp8": (_FP8_ROW, _FP8_ROW),
        "fbgemm_fp8": (_FP8_ROW, _FP8_ROW),
        "mxfp8": (_MXFP8, _MXFP8),
        "int8_per_channel_weight_only": (None, _INT8_ROW),
        "experts_int8": (None, _INT8_ROW),
        "bitsandbytes": (_bitsandbytes(4), _bitsandbytes(4)),
    }
    key = name.lower()
    if key not in online:
        return Quantization(
            name, unknown=f"how {quoted(name)} holds a model that is not stored so is not known"
        )
    linear, experts = online[key]
    return Quantization(name, linear, experts)


def from_config(settings: Mapping[str, object]) -> Quantization:
    """What a checkpoint's ``quantization_config`` says. A format that cannot be read is ``unknown``, with why."""
    inner = settings.get("quantization")
    if isinstance(inner, Mapping):  # ModelOpt's hf_quant_config.json
        settings = {"quant_method": "modelopt", **inner}
    method = str(settings.get("quant_method") or settings.get("quant_algo") or "unknown").lower()
    reader = _READERS.get(method)
    if reader is None:
        return Quantization(method, unknown=f"quantization method {quoted(method)} is not known")
    try:
        return reader(method, settings)
    except InputError as error:
        return Quantization(method, unknown=error.what)


def _fp8(method: str, settings: Mapping[str, object]) -> Quantization:
    block = settings.get("weight_block_size")
    scheme = _with_input_scale(_FP8_TENSOR, settings.get("activation_scheme") == "static")
    if block is not None:
        rows, columns = _pair(block, "weight_block_size")
        scheme = _FP8_BLOCK._replace(block_rows=rows, block_columns=columns)
    if method == "fbgemm_fp8":
        scheme = _FP8_ROW
    return Quantization(method, scheme, scheme, _ignoring(settings))


def _deepseek_v4_fp8(method: str, settings: Mapping[str, object]) -> Quantization:
    """DeepSeek-V4: fp8 in blocks, and experts in MXFP4 unless ``expert_dtype`` of the config says fp8.

    vLLM 0.33, models/deepseek_v4/quant_config.py.
    """
    experts = _FP8_BLOCK if settings.get("expert_dtype") == "fp8" else _MXFP4
    return Quantization(method, _FP8_BLOCK, experts, _ignoring(settings))


def _gptq(method: str, settings: Mapping[str, object]) -> Quantization:
    """GPTQ and AutoRound: groups along the inputs. A symmetric format's zero points are dropped when loaded."""
    scheme = _grouped(settings, zeros=settings.get("sym", True) is False)
    if settings.get("desc_act") is True:
        # The order of the inputs and how to sort them, as int32 (gptq_marlin before vLLM 0.33).
        scheme = scheme._replace(input_bytes=8)
    rules = list(_ignoring(settings))
    own = settings.get("extra_config")
    for name, one in own.items() if isinstance(own, Mapping) else ():
        bits = one.get("bits", scheme.bits) if isinstance(one, Mapping) else None
        if not isinstance(bits, int):
            raise InputError(f"extra_config of {quoted(name)} does not say its bits")
        changed = {**settings, **one} if isinstance(one, Mapping) else settings
        rules.append(Rule(Patterns.of([str(name)]), None if bits >= 16 else _grouped(changed, zeros=False)))
    dynamic = settings.get("dynamic")
    for name, one in dynamic.items() if isinstance(dynamic, Mapping) else ():
        sign, _, pattern = str(name).rpartition(":")
        changed = {**settings, **one} if isinstance(one, Mapping) else settings
        rules.append(
            Rule(Patterns.of([f"re:{pattern}"]), None if sign == "-" else _grouped(changed, zeros=False))
        )
    if settings.get("lm_head") is True:
        rules.append(Rule(Patterns.of(["lm_head"]), scheme))
    return Quantization(method, scheme, scheme, tuple(rules))


def _awq(method: str, settings: Mapping[str, object]) -> Quantization:
    scheme = _grouped(settings, zeros=settings.get("zero_point", True) is not False)
    rules = _ignoring(settings)
    if settings.get("lm_head") is True:
        rules = (*rules, Rule(Patterns.of(["lm_head"]), scheme))
    return Quantization(method, scheme, scheme, rules)


def _grouped(settings: Mapping[str, object], *, zeros: bool) -> Scheme:
    bits = _number(settings, "bits", "w_bit", "wbits")
    group = settings.get("group_size", settings.get("q_group_size", 128))
    if not isinstance(group, int) or isinstance(group, bool) or group == 0 or group < -1:
        raise InputError(f"group_size is {quoted(group)}, no number of weights")
    return Scheme(
        bits, block_columns=0 if group == -1 else group, scale_bytes=None, zero_bits=bits if zeros else 0
    )


def _compressed_tensors(method: str, settings: Mapping[str, object]) -> Quantization:
    """Each group of ``config_groups`` says what it targets; modules that none targets keep the model's dtype."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise InputError("compressed-tensors without config_groups")
    rules = list(_ignoring(settings))
    linear: Scheme | None = None
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise InputError(f"config_groups.{name} is no mapping")
        scheme = _compressed_scheme(group, str(group.get("format") or settings.get("format") or ""))
        targets = [str(target) for target in _list(group, "targets")]
        named = [target for target in targets if target != "Linear"]
        if "Linear" in targets:
            linear = scheme
        if named:
            rules.append(Rule(Patterns.of(named), scheme))
    return Quantization(method, linear, linear, tuple(rules))


def _compressed_scheme(group: Mapping[str, object], form: str) -> Scheme | None:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        return None
    bits, kind = _number(weights, "num_bits"), weights.get("type", "int")
    strategy = weights.get("strategy")
    size = weights.get("group_size")
    group_size = size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 0
    if kind == "float" and bits == 4:
        if form.startswith("mxfp4") or group_size == 32:
            return _MXFP4
        return _NVFP4 if isinstance(inputs, Mapping) else _NVFP4._replace(matrix_bytes=4, operand_bits=16)
    if bits == 8 and (isinstance(inputs, Mapping) or kind == "float"):
        if kind == "float" and group_size == 32 and strategy == "group":
            return _MXFP8
        dynamic = not isinstance(inputs, Mapping) or inputs.get("dynamic") is not False
        if strategy == "block":
            rows, columns = _pair(weights.get("block_structure"), "block_structure")
            return _FP8_BLOCK._replace(block_rows=rows, block_columns=columns)
        return _with_input_scale(_FP8_ROW if strategy == "channel" else _FP8_TENSOR, not dynamic)
    zeros = bits if weights.get("symmetric") is False else 0
    if strategy in ("group", "channel"):
        columns = group_size if strategy == "group" else 0
        order = 8 if weights.get("actorder") in ("group", True) else 0
        return Scheme(bits, block_columns=columns, scale_bytes=None, zero_bits=zeros, input_bytes=order)
    raise InputError(f"weights of {bits} bits by {quoted(strategy)} are not known")


def _modelopt(method: str, settings: Mapping[str, object]) -> Quantization:
    algorithm = str(settings.get("quant_algo") or settings.get("quant_method") or "").upper()
    schemes = {
        "FP8": _with_input_scale(_FP8_TENSOR, True),
        "FP8_PER_CHANNEL_PER_TOKEN": _FP8_ROW,
        "FP8_PB_WO": _FP8_BLOCK,
        "NVFP4": _NVFP4,
        "MODELOPT_FP4": _NVFP4,
        "W4A16_NVFP4": _NVFP4._replace(matrix_bytes=4, operand_bits=16),
        "MXFP8": _MXFP8,
    }
    if algorithm in ("MIXED_PRECISION", "MODELOPT_MIXED"):
        return _modelopt_mixed(method, settings, schemes)
    if algorithm not in schemes:
        raise InputError(f"quant_algo {quoted(algorithm)} is not known")
    scheme = schemes[algorithm]
    return Quantization(method, scheme, scheme, _ignoring(settings))


def _modelopt_mixed(
    method: str, settings: Mapping[str, object], schemes: Mapping[str, Scheme]
) -> Quantization:
    """Each quantized module is listed with its format; the others keep the model's dtype."""
    listed = settings.get("quantized_layers")
    if not isinstance(listed, Mapping):
        raise InputError("mixed precision without quantized_layers")
    by_scheme: dict[str, list[str]] = {}
    for name, one in listed.items():
        algorithm = str(one.get("quant_algo") if isinstance(one, Mapping) else one).upper()
        if algorithm not in schemes:
            raise InputError(f"quant_algo {quoted(algorithm)} is not known")
        by_scheme.setdefault(algorithm, []).append(str(name))
    rules = tuple(Rule(Patterns.of(names), schemes[one]) for one, names in by_scheme.items())
    return Quantization(method, None, None, rules)


def _mxfp4(method: str, settings: Mapping[str, object]) -> Quantization:
    """Experts alone (gpt-oss)."""
    return Quantization(method, None, _MXFP4, _ignoring(settings))


def _mxfp8(method: str, settings: Mapping[str, object]) -> Quantization:
    return Quantization(method, _MXFP8, _MXFP8, _ignoring(settings))


def _bits_and_bytes(method: str, settings: Mapping[str, object]) -> Quantization:
    scheme = _bitsandbytes(8 if settings.get("load_in_8bit") is True else 4)
    return Quantization(method, scheme, scheme, _ignoring(settings))


def _bitsandbytes(bits: int) -> Scheme:
    return _INT8_ROW if bits == 8 else Scheme(4, block_columns=_BNB4_BLOCK)


def _experts_int8(method: str, settings: Mapping[str, object]) -> Quantization:
    return Quantization(method, None, _INT8_ROW, _ignoring(settings))


_READERS: Mapping[str, Callable[[str, Mapping[str, object]], Quantization]] = {
    "auto-round": _gptq,
    "awq": _awq,
    "awq_marlin": _awq,
    "bitsandbytes": _bits_and_bytes,
    "compressed-tensors": _compressed_tensors,
    "deepseek_v4_fp8": _deepseek_v4_fp8,
    "experts_int8": _experts_int8,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "gptq_marlin": _gptq,
    "inc": _gptq,
    "intel/auto-round": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
}


def _with_input_scale(scheme: Scheme, static: bool) -> Scheme:
    """The scheme with a float32 scale of the inputs, where it was calibrated."""
    return scheme._replace(matrix_bytes=scheme.matrix_bytes + 4) if static else scheme


#: Names under which formats list what they leave alone.
_IGNORE_FIELDS = (
    "ignore",
    "ignored_layers",
    "modules_to_not_convert",
    "exclude_modules",
    "llm_int8_skip_modules",
)


def _ignoring(settings: Mapping[str, object]) -> tuple[Rule, ...]:
    names = [str(name) for field in _IGNORE_FIELDS for name in _list(settings, field)]
    return (Rule(Patterns.of(names), None),) if names else ()


def _number(settings: Mapping[str, object], *names: str) -> int:
    for name in names:
        value = settings.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 16:
            return value
        if value is not None:
            raise InputError(f"{name} is {quoted(value)}, no number of bits")
    raise InputError(f"{names[0]} is missing")


def _pair(value: object, name: str) -> tuple[int, int]:
    if isinstance(value, list | tuple) and len(value) == 2:
        rows, columns = value
        if isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0:
            return rows, columns
    raise InputError(f"{name} is {quoted(value)}, no rows and columns")


def _list(settings: Mapping[str, object], name: str) -> Sequence[object]:
    value = settings.get(name)
    return value if isinstance(value, list | tuple) else ()


def _blocks(size: int, block: int) -> int:
    return _ceil_div(size, block) if block else 1


def _round_up(size: int, multiple: int) -> int:
    return _ceil_div(size, multiple) * multiple


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
