"""What the weights of a model are, and how many of their bytes one rank holds.

A model's weights are a list of `WeightGroup`: one module each, in all the layers that have it.
`kvplan.core.layouts` makes the list; here it is divided among ranks, by the rules of vLLM 0.33
(model_executor/layers/linear.py, vocab_parallel_embedding.py, fused_moe/config.py and
distributed/utils.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

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

    def repeats_on(self, stage: Stage) -> int:
        """How often a pipeline stage has it."""
        if self.place == "layers":
            if stage.end_layer is None and stage.first_layer == 0:
                return len(self.layers)
            end = stage.end_layer
            return sum(1 for i in self.layers if i >= stage.first_layer and (end is None or i < end))
        here = {
            "first": stage.is_first,
            "last": stage.is_last,
            "ends": stage.is_first or stage.is_last,
            "all": True,
            "draft": stage.drafts and stage.is_last,
        }
        return self.repeats if here[self.place] else 0


class Ranks(NamedTuple):
    """How the ranks of one pipeline stage share its weights."""

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    num_kv_heads: int = 1


class Stage(NamedTuple):
    """A pipeline stage: its layers from ``first_layer`` up to ``end_layer`` (None: all the rest).

    ``drafts``: whether layers for multi-token prediction are loaded.
    """

    first_layer: int = 0
    end_layer: int | None = None
    is_first: bool = True
    is_last: bool = True
    drafts: bool = False


class Weights(NamedTuple):
    """What the weights of a model amount to and how that is known.

    ``groups`` is empty where only a total is known. ``stored_bytes`` is what the files hold, where
    files were read. ``quantization`` names the method of weights that are not held in the model's
    dtype, such as ``fp8``: their bytes are known from files only. ``unknown`` says why the weights could not be
    listed, where they could not.
    """

    parameters: int | None
    source: Literal["config", "safetensors", "gguf", "catalogue"]
    groups: tuple[WeightGroup, ...] = ()
    stored_bytes: int | None = None
    quantization: str | None = None
    unknown: str | None = None

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

    def total_bytes(self, dtype: str, drafts: bool = False) -> int | None:
        """Bytes of all weights once, as they are held on the GPU; None if unknown.

        Quantized weights are held as the files store them. Others are held in ``dtype``, whatever the
        files hold: vLLM loads a float32 checkpoint in 16 bits. With ``drafts``, layers for multi-token
        prediction count too.
        """
        return self.rank_bytes(dtype, tensor_parallel_size=1, num_kv_heads=1, drafts=drafts)

    def per_gpu_bytes(self, dtype: str, tensor_parallel_size: int, num_kv_heads: int) -> int | None:
        """Bytes on one rank of tensor parallelism alone; None if unknown."""
        return self.rank_bytes(dtype, tensor_parallel_size=tensor_parallel_size, num_kv_heads=num_kv_heads)

    def rank_bytes(
        self,
        dtype: str,
        *,
        tensor_parallel_size: int,
        num_kv_heads: int,
        data_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        first_layer: int = 0,
        end_layer: int | None = None,
        is_first: bool = True,
        is_last: bool = True,
        drafts: bool = False,
    ) -> int | None:
        """Bytes on the largest rank of a pipeline stage with layers first_layer to end_layer - 1; None if unknown.

        Tensor parallelism divides attention, dense and shared-expert matrices and vocabulary tables; routed
        experts are divided among tensor x data parallel ranks, by their width, or whole with expert
        parallelism (``FusedMoEParallelConfig.make``); the rest of a model is repeated on every data parallel
        rank. Over the stages of a pipeline the bytes sum to the whole, but for tables that several stages
        hold: a tied one on the first and the last, and one of `Place` ``all`` on every stage.

        Exact in how each group is divided where the groups account for every parameter. Otherwise the
        total is divided evenly among the ranks of a stage, rounded up, and unknown for one stage of several.
        """
        ranks = Ranks(tensor_parallel_size, data_parallel_size, enable_expert_parallel, num_kv_heads)
        stage = Stage(first_layer, end_layer, is_first, is_last, drafts)
        if self.quantization is None and self._groups_are_complete:
            return _held_bytes(self.groups, dtype, ranks, stage)
        whole = self.stored_bytes if self.quantization is not None else None
        if whole is None and self.quantization is None and self.parameters is not None:
            whole = self.parameters * DTYPE_BYTES[dtype]
        if whole is None or stage._replace(drafts=False) != Stage():
            return None
        return ceil_div(whole, tensor_parallel_size)

    def bytes_read_per_step(self, dtype: str, tensor_parallel_size: int, num_kv_heads: int) -> int | None:
        """Bytes of weights that one rank reads in a step of text: all but tables and encoders of other inputs.

        Every expert counts as read. None if unknown.
        """
        held = self.per_gpu_bytes(dtype, tensor_parallel_size, num_kv_heads)
        if held is None or self.quantization is not None or not self._groups_are_complete:
            return held
        idle = [g for g in self.groups if g.kind in ("table", "tower")]
        ranks = Ranks(tensor_parallel_size, num_kv_heads=num_kv_heads)
        return held - _held_bytes(idle, dtype, ranks, Stage())

    @property
    def _groups_are_complete(self) -> bool:
        """Whether the groups account for every parameter."""
        return bool(self.groups) and self.parameters == parameters_of(self.groups)


def parameters_of(groups: Iterable[WeightGroup]) -> int:
    """Parameters of a model with these groups, as transformers' ``AutoModelForCausalLM`` counts them."""
    return sum(g.elements for g in groups if g.is_parameter)


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def _held_bytes(groups: Iterable[WeightGroup], dtype: str, ranks: Ranks, stage: Stage) -> int:
    total = 0
    for group in groups:
        repeats = group.repeats_on(stage)
        if repeats:
            copies, rows, columns = group.on_rank(ranks)
            total += repeats * copies * rows * columns * (group.element_bytes or DTYPE_BYTES[dtype])
    return total
