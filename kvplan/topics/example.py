"""The model that a topic reckons with, and small traces through the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kvplan.cache_groups import cache_groups
from kvplan.config import load_model
from kvplan.core.cost import constant
from kvplan.core.engine import GroupSpec, SchedulerConfig, StepWork, Turn
from kvplan.core.engines.contiguous import Contiguous, ContiguousConfig
from kvplan.core.engines.paged import Paged, PagedConfig
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.metrics import Metrics, RequestRecord
from kvplan.core.pool_map import FullestStep, PoolMap, pool_map
from kvplan.core.request import Request
from kvplan.core.simulate import StepRecord, run
from kvplan.errors import InputError
from kvplan.options import ExplainOptions, Resolver, flag
from kvplan.serving import Served, find_gpu, serve
from kvplan.topics.parts import Explanation, Part

DEFAULT_MODEL = "llama-2-13b"
#: vLLM's block tables are 32-bit numbers (v1/worker/block_table.py).
TABLE_ENTRY_BYTES = 4

_Value = TypeVar("_Value")

#: Lists are quoted up to this length.
_LONGEST_LIST = 60

#: The most tokens of an example: more is no example, and takes long.
_MOST_TOKENS = 1 << 18


class Example:
    """A model, served, and the settings of an example. Raises `InputError` for what cannot be served."""

    def __init__(self, topic: str, question: str, options: ExplainOptions) -> None:
        self._topic = topic
        self._question = question
        self.options = options
        self._resolver: Resolver[ExplainOptions] = Resolver(options)
        self._shown = ["model", "engine", "dtype", "kv_cache_dtype", "block_size"]
        name = self._resolver.choose("model", DEFAULT_MODEL, "default")
        spec = load_model(
            name,
            catalogue=options.catalogue,
            overrides=options.set,
            where="--model",
        )
        gpu, count = find_gpu(options.gpu)
        if options.gpu is not None:
            self._resolver.choose("gpu", options.gpu, "default")
            self._shown.append("gpu")
        self.served: Served = serve(spec, self._resolver, gpu=gpu, gpu_count=count, seq=options.seq)

    def check_runnable(self) -> None:
        """Refuse a model whose layers do not all keep every token: the engines run no other. Raises `InputError`."""
        if cache_groups(self.served).specs != (GroupSpec(),):
            raise InputError(
                "this example needs a model whose layers keep all tokens",
                where=f"model {self.served.spec.name}",
                hint="choose another with --model",
            )

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.served.kv.block_size

    @property
    def token_bytes(self) -> int:
        """KV of a token in all layers of the whole model."""
        return self.served.kv.bytes_per_token

    @property
    def block_bytes(self) -> int:
        """A block in all layers of the whole model."""
        return self.served.kv.bytes_per_block

    def payload_bytes(self, tokens: int) -> int:
        """KV of a sequence in all layers, no block padded."""
        form = self.served.deployment.cache
        return sum(count * cache.payload_bytes(tokens, form) for cache, count in self.served.spec.attention)

    def choose(self, name: str, default: _Value) -> _Value:
        """The given value of a setting of the example, else its default."""
        if name not in self._shown:
            self._shown.append(name)
        return self._resolver.choose(name, default, "default of the example")

    def tokens(self, name: str, default: str) -> tuple[int, ...]:
        """Numbers of a list with commas, each at least 1. Raises `InputError`."""
        text = self.choose(name, default)
        parts = [part.strip().replace("_", "") for part in text.split(",")]
        shown = text if len(text) <= _LONGEST_LIST else f"{text[:_LONGEST_LIST]}..."
        if not all(part.isascii() and part.isdigit() and int(part[:9]) > 0 for part in parts):
            raise InputError(
                f'"{shown}" is no list of whole numbers',
                where=flag(name),
                hint=f"write numbers such as {default}",
            )
        numbers = tuple(int(part[:12]) for part in parts)
        if len(numbers) > 26 or max(numbers) > _MOST_TOKENS:
            raise InputError(
                f'"{shown}" is too much for an example',
                where=flag(name),
                hint=f"write at most 26 numbers up to {_MOST_TOKENS:,}",
            )
        return numbers

    def check_small(self, tokens: int) -> None:
        """Refuse an example of more tokens than are run in a moment. Raises `InputError`."""
        if tokens > _MOST_TOKENS:
            raise InputError(
                f"{tokens:,} tokens in all are too many for an example",
                where=f"kvplan explain {self._topic}",
                hint=f"at most {_MOST_TOKENS:,}; kvplan simulate takes whole traces",
            )

    def seq(self, most: int | None = None) -> int:
        """Tokens of a sequence: as given, else the model's longest, but at most ``most``.

        ``most`` also says that they are run: raises `InputError` for more than an example takes.
        """
        longest = self.served.deployment.max_model_len
        found = self.choose("seq", longest if most is None else min(longest, most))
        if found > _MOST_TOKENS and most is not None:
            raise InputError(
                f"{found:,} is too much for an example", where="--seq", hint=f"write at most {_MOST_TOKENS:,}"
            )
        return found

    def vllm(
        self, blocks: int, *, seats: int = 256, caching: bool = False, length: int | None = None
    ) -> VllmPlain:
        """The engine of vLLM with so many usable blocks and ``seats`` for sequences; a prompt is never cut."""
        size = self.block_size
        return VllmPlain(
            SchedulerConfig(
                num_gpu_blocks=blocks + 1,
                block_size=size,
                max_num_batched_tokens=max(seats, blocks * size),
                max_num_seqs=seats,
                max_model_len=length or blocks * size,
                enable_prefix_caching=caching,
            )
        )

    def paged(self, blocks: int, *, seats: int, cpu_blocks: int = 0, caching: bool = False) -> Paged:
        """The engine of the vLLM paper, likewise."""
        tokens = blocks * self.block_size
        return Paged(
            PagedConfig(
                num_gpu_blocks=blocks,
                block_size=self.block_size,
                max_num_batched_tokens=max(seats, tokens),
                max_num_seqs=seats,
                max_model_len=tokens + 1,
                enable_prefix_caching=caching,
                num_cpu_blocks=cpu_blocks,
            ),
            watched=True,
        )

    def static(self, length: int, *, seats: int) -> Contiguous:
        """Static batching with room for a batch of ``seats`` reservations of ``length`` tokens."""
        return Contiguous(
            ContiguousConfig(
                reservation="static",
                num_gpu_blocks=seats * length,
                max_num_batched_tokens=seats * length,
                max_num_seqs=seats,
                max_model_len=length,
            ),
            watched=True,
        )

    def explanation(self, parts: Sequence[Part], notes: Sequence[str] = ()) -> Explanation:
        """What was found, with the settings that it depends on."""
        self._resolver.note_rest()
        return Explanation(
            self._topic,
            self._question,
            dict(self._resolver.settings),
            tuple(self._shown),
            tuple(parts),
            tuple(notes),
            tuple(self.served.warnings),
        )


class Moment(NamedTuple):
    """A step of a trial: tokens computed of each, who was preempted or came back, ``used`` blocks after scheduling.

    ``lost_tokens`` are what each of the preempted had computed.
    ``clock`` is the time after the step, in what the price counts.
    """

    scheduled: dict[str, int]
    preempted: tuple[str, ...]
    lost_tokens: tuple[int, ...]
    resumed: tuple[str, ...]
    finished: tuple[str, ...]
    used: int
    clock: int


@dataclass(frozen=True, slots=True)
class Trial:
    """What an engine did with a small trace, step by step."""

    moments: tuple[Moment, ...]
    metrics: Metrics
    records: tuple[RequestRecord, ...]
    fullest: PoolMap

    @property
    def scheduled_tokens(self) -> int:
        """Tokens that were computed."""
        return self.metrics.scheduled_tokens

    @property
    def peak_blocks(self) -> int:
        """Most blocks in use."""
        return self.metrics.kv_figures().peak_blocks


def try_out(
    requests: Sequence[Request],
    engine: VllmPlain | Paged | Contiguous,
    *,
    price: Callable[[StepWork], int] | None = None,
    table_of: str | None = None,
) -> Trial:
    """Run requests, whose arrivals count steps, through an engine that takes one step a turn.

    ``price`` says what a step costs (1, which is a step); requests then all come at 0.
    """
    config = engine.config
    records: list[RequestRecord] = []
    metrics = Metrics(
        num_gpu_blocks=config.num_gpu_blocks,
        usable_blocks=config.usable_blocks,
        block_size=config.block_size,
        prefix_caching=config.enable_prefix_caching,
        seconds_per_tick=None,
        on_request=records.append,
    )
    moments: list[Moment] = []
    fullest = FullestStep(engine)

    def observe(record: StepRecord) -> None:
        fullest(record)
        turn = record.turn
        if isinstance(turn, Turn):
            moments.append(_moment(turn, config.usable_blocks, record.end))

    outcome = run(
        requests, engine, price or constant(1), metrics, step_numbered=price is None, observe=observe
    )
    assert outcome.status == "done", "an example fits its pool"
    assert fullest.picture is not None, "an example has a request that runs"
    return Trial(
        tuple(moments),
        metrics,
        tuple(sorted(records, key=lambda record: record.number)),
        pool_map(fullest.picture, step=fullest.step, table_of=table_of),
    )


def _moment(turn: Turn[Any], usable: int, clock: int) -> Moment:
    return Moment(
        {sequence.id: tokens for sequence, tokens in turn.scheduled},
        tuple(sequence.id for sequence in turn.preempted),
        tuple(why.lost_tokens for why in turn.preemptions),
        tuple(sequence.id for sequence in turn.resumed),
        tuple(sequence.id for sequence in turn.finished),
        usable - turn.free_blocks,
        clock,
    )
