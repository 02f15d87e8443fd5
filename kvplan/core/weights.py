"""What the weights of a model are, and how many of their bytes one rank holds.

A model's weights are a list of `WeightGroup`: one module each, in all the layers that have it.
`kvplan.core.layouts` makes the list; here it is divided among ranks, by the rules of vLLM 0.33
(model_executor/layers/linear.py, vocab_parallel_embedding.py, fused_moe/config.py and
distributed/utils.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # most models are not quantized, and need not wait for it
    from kvplan.core.quantization import Quantization, Scheme

#: Bytes of one element, by the names that vLLM and Hugging Face configs use.
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: vLLM pads the vocabulary to a multiple of this before it divides it among ranks
#: (model_executor/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE).
VOCAB_PADDING = 64

#: How a matrix is divided among the ranks of tensor parallelism: its rows (a column-parallel layer, in
#: PyTorch's words), its columns (a row-parallel one), its rows with the key/value heads that they belong to,
#: its rows after padding the vocabulary, or not at all.
Split = Literal["rows", "columns", "kv_heads", "vocab", "replicated"]

#: Which stages of a pipeline hold a group: those of its layers, the first, the last, both ends (a tied
#: table), every one (a table that vLLM's class of the model builds without asking for the stage), or none
#: unless the model drafts its own tokens.
Place = Literal["layers", "first", "last", "ends", "all", "draft"]

#: What a group is used for. ``linear`` layers, ``experts`` and a ``head`` are multiplied with, and so are ``plain``
#: matrices, which no quantization touches (routers, convolutions); of a ``table`` a token takes one row; a
#: ``vector`` is a norm, a bias or another small parameter. ``tower`` is all that encodes images or sound.
Kind = Literal["linear", "experts", "plain", "head", "table", "vector", "tower"]


class WeightGroup(NamedTuple):
    """One weight of ``rows`` x ``columns`` elements, as often as the model has it.

    ``name`` is the module's path, inside its layer where it has layers. ``copies`` of it are in each layer:
    the experts of a layer, of which one token uses ``used``.
    """

    name: str
    rows: int
    columns: int = 1
    split: Split = "replicated"
    kind: Kind = "vector"
    place: Place = "layers"
    layers: tuple[int, ...] = ()
    copies: int = 1
    used: int = 1
    #: Heads that the rows of a ``kv_heads`` split belong to; 0: the model's key/value heads.
    heads: int = 0
    #: Bytes of an element that is not held in the model's dtype.
    element_bytes: int | None = None
    #: Whether it counts as parameters of the model. Drafts and buffers do not, nor do towers of models that
    #: transformers has a class without towers for (Llama-4, Qwen3.5).
    is_parameter: bool = True

    @property
    def repeats(self) -> int:
        """How many layers have it; 1 for what is in none."""
        return len(self.layers) or 1

    @property
    def elements(self) -> int:
        """Elements in the whole model, each counted once."""
        return self.rows * self.columns * self.copies * self.repeats

    @property
    def active_elements(self) -> int:
        """Elements that one token uses: of routed experts as many as are used, one row of a table."""
        if self.kind == "table":
            return self.columns
        return self.rows * self.columns * self.used * self.repeats

    def on_rank(self, ranks: Ranks) -> tuple[int, int, int]:
        """Copies, rows and columns on one rank, with the rows and heads that the engine pads or repeats.

        Where a size is no multiple of the ranks, the largest rank counts.
        """
        tp = ranks.tensor_parallel_size
        copies, rows, columns = self.copies, self.rows, self.columns
        if self.kind == "experts":
            tp *= ranks.data_parallel_size
            if ranks.enable_expert_parallel:
                return ceil_div(copies, tp), rows, columns
        if self.split == "rows":
            rows = ceil_div(rows, tp)
        elif self.split == "columns":
            columns = ceil_div(columns, tp)
        elif self.split == "kv_heads":
            heads = self.heads or ranks.num_kv_heads
            rows = rows // heads * ceil_div(heads, tp)
        elif self.split == "vocab":
            # One rank pads too, but its padding is left out, so that one rank holds the whole model.
            rows = rows if tp == 1 else ceil_div(ceil_div(rows, VOCAB_PADDING) * VOCAB_PADDING, tp)
        return copies, rows, columns

    def layers_on(self, stage: Stage) -> Sequence[int]:
        """The layers of a pipeline stage that have it; for what is in no layer, (0,) where the stage has it."""
        if self.place == "layers":
            if stage.is_whole:
                return self.layers
            return [i for i in self.layers if stage.first <= i < stage.end]
        here = {
            "first": stage.is_first,
            "last": stage.is_last,
            "ends": stage.is_first or stage.is_last,
            "all": True,
            "draft": stage.is_last,
        }
        return (self.layers or (0,)) if here[self.place] else ()

    @property
    def may_be_quantized(self) -> bool:
        """Whether it is a matrix that a quantization is applied to, unless it is named as left alone."""
        if self.columns == 1:
            return False
        if self.kind == "tower":
            return self.split != "replicated"
        return self.kind in ("linear", "experts") or (self.kind == "head" and self.place == "last")


class Ranks(NamedTuple):
    """How the ranks of one pipeline stage share its weights."""

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    num_kv_heads: int = 1


class Stage(NamedTuple):
    """One stage of a pipeline: layers ``first`` up to ``end``; the last also has the draft's layers."""

    first: int
    end: int
    is_first: bool
    is_last: bool

    @property
    def is_whole(self) -> bool:
        """Whether it is the only one."""
        return self.is_first and self.is_last

    def holds(self, layer: int) -> bool:
        """Whether a layer, or a draft's layer numbered on from the last, is here."""
        return self.first <= layer and (layer < self.end or self.is_last)


#: A model that is not cut into stages, whatever the number of its layers.
WHOLE_MODEL = Stage(0, 1 << 30, is_first=True, is_last=True)


class RankPart(NamedTuple):
    """What one rank of a stage holds of a group in one scheme (None: the model's dtype).

    ``layers`` of the stage have it, each ``copies`` times on the rank; ``elements`` and ``bytes`` are those of all.
    """

    group: WeightGroup
    scheme: Scheme | None
    layers: int
    copies: int
    elements: int
    bytes: int


class Weights(NamedTuple):
    """What the weights of a model amount to and how that is known.

    ``groups`` is empty where only a total is known. ``stored_bytes`` is what the files hold without layers that
    only draft, where files were read. ``format`` says how weights are held that are not in the model's dtype.
    ``unlisted`` says why there are no groups, where a config lacks what they need.
    """

    parameters: int | None
    source: Literal["config", "safetensors", "gguf", "catalogue"]
    groups: tuple[WeightGroup, ...] = ()
    stored_bytes: int | None = None
    format: Quantization | None = None
    unlisted: str | None = None
    #: Elements of the tables of rotary positions, which are held beside the weights (`kvplan.core.rotary`).
    rotary_elements: int = 0

    @property
    def quantization(self) -> str | None:
        """The name of the method of quantization; None for weights in the model's dtype."""
        return self.format.method if self.format else None

    @property
    def has_experts(self) -> bool:
        """Whether some of the weights are routed experts; False where only a total is known."""
        return any(group.kind == "experts" for group in self.groups)

    def quantized_by(self, name: str) -> Weights:
        """These weights as ``--quantization NAME`` has the engine hold them; stored ones stay as they are stored."""
        from kvplan.core.quantization import from_name

        return self if self.format else self._replace(format=from_name(name), stored_bytes=None)

    @property
    def active_parameters(self) -> int | None:
        """Parameters that one token of text is multiplied with: routed experts counted as far as used."""
        if not self.groups:
            return self.parameters
        return sum(g.active_elements for g in self.groups if g.is_parameter and g.kind != "tower")

    @property
    def head_parameters(self) -> int:
        """Parameters that only a sampled token is multiplied with: the vocabulary's head, its own or tied."""
        return sum(g.elements for g in self.groups if g.kind == "head")

    @property
    def why_unknown(self) -> str | None:
        """Why the bytes are not known, where they are not."""
        if self.format is not None and self.stored_bytes is None:
            if self.format.unknown is not None:
                return self.format.unknown
            if not self._groups_are_complete:
                return self.unlisted or "which weights are quantized is not known"
        if self.parameters is None:
            return self.unlisted
        return None if self.groups else "only their total is known, not what each stage holds"

    def total_bytes(self, dtype: str, drafts: bool = False) -> int | None:
        """Bytes of all weights once, as they are held on the GPU; None if unknown, as `why_unknown` says.

        Weights that are not quantized are held in ``dtype``, whatever the files hold: vLLM loads a float32
        checkpoint in 16 bits. With ``drafts``, layers for multi-token prediction count too.
        """
        return self.rank_bytes(dtype, Ranks(), drafts=drafts)

    def rank_bytes(
        self, dtype: str, ranks: Ranks, stage: Stage = WHOLE_MODEL, *, drafts: bool = False
    ) -> int | None:
        """Bytes on the largest rank of a pipeline stage; None if unknown. ``drafts`` as for `total_bytes`.

        Tensor parallelism divides attention, dense and shared-expert matrices and vocabulary tables; routed
        experts are divided among tensor x data parallel ranks, by their width, or whole with expert
        parallelism (``FusedMoEParallelConfig.make``); the rest of a model is repeated on every data parallel
        rank. Over the stages of a pipeline the bytes sum to the whole, but for tables that several stages
        hold: a tied one on the first and the last, and one of `Place` ``all`` on every stage.

        Exact in how each group is divided where the groups account for every parameter. Quantized files are
        divided as their format would be, which leaves the files' total as it is. Where only a total is known, it
        is divided evenly among the ranks of a stage, rounded up, and is unknown for one stage of several.
        """
        known = self._groups_are_complete and (self.format is None or self.format.unknown is None)
        main = [g for g in self.groups if g.place != "draft"] if known else ()
        loaded = self.groups if drafts else main
        if known and (self.format is None or self.stored_bytes is None):
            return _held_bytes(loaded, dtype, ranks, stage, self.format)
        if known and self.stored_bytes is not None:
            here, kept = _quantized_bytes(loaded, dtype, ranks, stage, self.format)
            whole, _ = _quantized_bytes(main, dtype, Ranks(), WHOLE_MODEL, self.format)
            return ceil_div(self.stored_bytes * here, whole) + kept
        total = self.stored_bytes if self.format is not None else None
        if self.format is None and self.parameters is not None:
            total = self.parameters * DTYPE_BYTES[dtype]
        if total is None or not stage.is_whole:
            return None
        return ceil_div(total, ranks.tensor_parallel_size)

    def rotary_bytes(self, dtype: str) -> int:
        """Bytes of the tables of rotary positions on every rank: no weights, but part of a loaded model."""
        return self.rotary_elements * DTYPE_BYTES[dtype]

    def rank_parts(self, dtype: str, ranks: Ranks, stage: Stage = WHOLE_MODEL) -> tuple[RankPart, ...]:
        """What a rank of a stage holds, group by group, without layers that only draft; () where it is not known."""
        if not self._groups_are_complete or (self.format is not None and self.format.unknown is not None):
            return ()
        main = (group for group in self.groups if group.place != "draft")
        return tuple(_parts(main, dtype, ranks, stage, self.format))

    @property
    def _groups_are_complete(self) -> bool:
        """Whether the groups account for every parameter; files have towers and buffers of them too."""
        if not self.groups:
            return False
        stored = sum(g.elements for g in self.groups if g.place != "draft")
        return self.parameters in (parameters_of(self.groups), stored)


def parameters_of(groups: Iterable[WeightGroup]) -> int:
    """Parameters of a model with these groups, as transformers' ``AutoModelForCausalLM`` counts them."""
    return sum(g.elements for g in groups if g.is_parameter)


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def _held_bytes(
    groups: Iterable[WeightGroup], dtype: str, ranks: Ranks, stage: Stage, form: Quantization | None
) -> int:
    return sum(_quantized_bytes(groups, dtype, ranks, stage, form))


def _quantized_bytes(
    groups: Iterable[WeightGroup], dtype: str, ranks: Ranks, stage: Stage, form: Quantization | None
) -> tuple[int, int]:
    """Bytes of the groups, and of what is kept a second time in the model's dtype."""
    held = kept = 0
    for part in _parts(groups, dtype, ranks, stage, form):
        held += part.bytes
        if part.scheme is not None and form is not None and form.keeps_unpacked(part.group.name):
            kept += part.elements * (part.group.element_bytes or DTYPE_BYTES[dtype])
    return held, kept


def _parts(
    groups: Iterable[WeightGroup], dtype: str, ranks: Ranks, stage: Stage, form: Quantization | None
) -> Iterator[RankPart]:
    for group in groups:
        layers = group.layers_on(stage)
        if not layers:
            continue
        copies, rows, columns = group.on_rank(ranks)
        element = group.element_bytes or DTYPE_BYTES[dtype]
        for scheme, repeats in _schemes(group, layers, form):
            number = repeats * copies
            matrix = rows * columns * element if scheme is None else scheme.bytes_of(rows, columns, element)
            yield RankPart(group, scheme, repeats, copies, number * rows * columns, number * matrix)


def _schemes(
    group: WeightGroup, layers: Sequence[int], form: Quantization | None
) -> Iterable[tuple[Scheme | None, int]]:
    """How the group is held, and in how many of the layers so."""
    if form is None or not group.may_be_quantized:
        return ((None, len(layers)),)
    if not form.rules:
        return ((_scheme(group, group.name, form), len(layers)),)
    return Counter(_scheme(group, group.name.format(i), form) for i in layers).items()


def _scheme(group: WeightGroup, name: str, form: Quantization) -> Scheme | None:
    if group.kind == "experts":
        return form.expert_scheme(name, is_down=group.split == "columns")
    return form.head_scheme(name) if group.kind == "head" else form.scheme(name)
