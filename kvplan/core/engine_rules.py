"""The defaults of an engine: what sizing asks of them, and what engines beside vLLM have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvplan.core.kv_cache import Cache
from kvplan.core.model import ModelSpec


class EngineRules(Protocol):
    """The defaults of an engine, under vLLM's names, and what it does not have."""

    @property
    def name(self) -> str:
        """Of the engine."""

    @property
    def version(self) -> str:
        """Of its rules; empty where there is one set."""

    @property
    def missing_settings(self) -> frozenset[str]:
        """Options that the engine does not have, or whose effect in it is not known."""

    @property
    def batch_holds_sequences(self) -> bool:
        """Whether a step must have room for a token of every sequence."""

    @property
    def spreads_layers(self) -> bool:
        """Whether a number of GPUs alone means stages; else it means tensor parallel ranks."""

    @property
    def latent_row_multiple(self) -> int:
        """Elements that a latent's row is padded to a multiple of."""

    def lengths(self, spec: ModelSpec) -> tuple[int, int] | None:
        """``max_model_len`` where none is given, and the longest that may be; None: the model states none."""

    def batch_limits(self, memory_bytes: int | None, gpu_name: str) -> tuple[int, int]:
        """``(max_num_batched_tokens, max_num_seqs)`` on this GPU."""

    def fitted_batch(self, batch: int, seqs: int, max_model_len: int, *, chunked_prefill: bool) -> int:
        """The default batch in tokens, fitted to the sequences where the engine does so."""

    def async_scheduling(self, method: str | None) -> bool:
        """Whether steps overlap, with a way to draft or without (None)."""

    def encoder_tokens(self, max_num_batched_tokens: int, encoder_length: int | None) -> int:
        """Tokens that cross attention reserves for."""

    def memory_share(
        self,
        *,
        memory_bytes: int | None,
        ranks: int,
        max_num_batched_tokens: int,
        enforce_eager: bool,
        caches: Sequence[Cache],
    ) -> float:
        """``gpu_memory_utilization``, or what the engine has in its place."""

    def prefix_caching(self, *, has_states: bool, has_attention: bool) -> bool:
        """Whether equal prefixes are kept."""

    def state_dtypes(self, caches: Sequence[Cache]) -> tuple[str | None, str | None]:
        """What convolutions and recurrent states are kept in; None: the model's own wish, or its dtype."""

    def kv_form(
        self,
        asked: str,
        *,
        spec: ModelSpec,
        dtype: str,
        compute_capability: str | None,
    ) -> tuple[str, str]:
        """``(form of the KV cache, why)``; ``why`` is empty where the form is what was asked for.

        Raises `InputError` for a form that the engine has not.
        """

    def default_block_size(
        self, caches: Sequence[Cache], kv_form: str, compute_capability: str | None
    ) -> tuple[int, str]:
        """``(tokens of a block, of what if of something special)``."""


class CommonRules:
    """Defaults that engines beside vLLM share; each class says what its engine has otherwise."""

    version = ""
    batch_holds_sequences = False
    spreads_layers = False
    latent_row_multiple = 1
    gpu_memory_utilization = 0.9
    missing_settings = frozenset(
        {
            "decode_context_parallel_size",
            "mamba_cache_dtype",
            "num_speculative_tokens",
            "speculative_method",
            "speculative_model",
            "enable_lora",
            "max_loras",
            "max_lora_rank",
        }
    )

    def lengths(self, spec: ModelSpec) -> tuple[int, int] | None:
        """What the model states."""
        longest = spec.max_position_embeddings
        return None if longest is None else (longest, longest)

    def fitted_batch(self, batch: int, seqs: int, max_model_len: int, *, chunked_prefill: bool) -> int:
        """The batch does not follow the sequences."""
        return batch

    def async_scheduling(self, method: str | None) -> bool:
        """Steps do not overlap in a way that memory depends on."""
        return False

    def encoder_tokens(self, max_num_batched_tokens: int, encoder_length: int | None) -> int:
        """The encoder's own longest input."""
        return encoder_length or max_num_batched_tokens

    def memory_share(
        self,
        *,
        memory_bytes: int | None,
        ranks: int,
        max_num_batched_tokens: int,
        enforce_eager: bool,
        caches: Sequence[Cache],
    ) -> float:
        """A share that depends on nothing."""
        return self.gpu_memory_utilization

    def state_dtypes(self, caches: Sequence[Cache]) -> tuple[str | None, str | None]:
        """The model's own wish, or its dtype."""
        return None, None
