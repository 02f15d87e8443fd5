"""The job of `kvplan explain`: a topic and a model in, the idea worked through with its numbers out."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import NamedTuple

from kvplan.errors import InputError, unknown_name
from kvplan.options import ExplainOptions, check_options, flag
from kvplan.topics.parts import Explanation


class Topic(NamedTuple):
    """The question that a topic answers, and the options of its example beside those of every model."""

    question: str
    options: tuple[str, ...] = ()


#: In the order in which they build on each other. Each is a module of `kvplan.topics`.
TOPICS = {
    "kv-cache": Topic("What does a KV cache save, and what does it cost?", ("seq",)),
    "formula": Topic("How many bytes does a token take, and where do they come from?", ("seq",)),
    "waste": Topic("What is lost when the longest length is reserved?", ("seq", "used_tokens")),
    "blocks": Topic("How do blocks work, and what has an operating system to do with it?", ("gpu",)),
    "block-size": Topic("How large should a block be?", ("seq", "block_sizes")),
    "prefix": Topic(
        "What do requests save that begin alike?",
        ("requests", "shared_prefix", "own_tokens", "output_tokens"),
    ),
    "batching": Topic("Why let requests join and leave at every step?", ("outputs", "rounds")),
    "preemption": Topic(
        "What happens when blocks run out?",
        ("requests", "input_tokens", "output_tokens", "num_gpu_blocks_override"),
    ),
    "paged-attention": Topic("Does attention over scattered blocks give the same result?", ("seq",)),
}
#: Options that every topic takes.
_OF_THE_MODEL = frozenset(
    {"model", "engine", "dtype", "kv_cache_dtype", "quantization", "block_size", "set", "models"}
)


def explain(topic: str, **options: object) -> Explanation:
    """Work a topic of `kvplan explain` through with the numbers of a model.

    ``options`` are the fields of `ExplainOptions`. Raises `InputError` for wrong input.

    >>> explain("formula").figure("bytes_per_token")
    819200
    """
    return explain_with(topic, ExplainOptions.of(options))


def explain_with(topic: str, options: ExplainOptions) -> Explanation:
    """`explain` with its options in one object. Raises `InputError`."""
    if topic not in TOPICS:
        raise unknown_name("topic", topic, TOPICS, where="TOPIC", listing="kvplan explain")
    check_options(options)
    takes = {*_OF_THE_MODEL, *TOPICS[topic].options}
    for item in fields(options):
        if item.name not in takes and getattr(options, item.name) != item.default:
            own = ", ".join(flag(name) for name in TOPICS[topic].options)
            raise InputError(
                f"{flag(item.name)} has no effect on this topic",
                where=flag(item.name),
                hint=f"{topic} takes {own} and what describes a model",
            )
    from kvplan.topics.example import Example

    module = import_module(f"kvplan.topics.{topic.replace('-', '_')}")
    found: Explanation = module.explain(Example(topic, TOPICS[topic].question, options))
    return found
