"""`kvplan explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvplan.cli import options as shared


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("explain", cls=shared.LightCommand, epilog="Example: kvplan explain batching")(explain)


def explain(
    ctx: typer.Context,
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="What to work through; without it the list.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model to reckon with (llama-2-13b).")
    ] = None,
    seq: Annotated[str | None, typer.Option("--seq", metavar="N", help="Tokens of one sequence.")] = None,
    used_tokens: Annotated[
        str | None, typer.Option("--used-tokens", metavar="N,N", help="waste: tokens used (50,200,1000).")
    ] = None,
    block_sizes: Annotated[
        str | None, typer.Option("--block-sizes", metavar="N,N", help="block-size: which ones (4,16,64).")
    ] = None,
    requests: Annotated[
        str | None, typer.Option("--requests", metavar="N", help="prefix (10), preemption (3).")
    ] = None,
    shared_prefix: Annotated[
        str | None, typer.Option("--shared-prefix", metavar="N", help="prefix: tokens in common (2000).")
    ] = None,
    own_tokens: Annotated[
        str | None, typer.Option("--own-tokens", metavar="N", help="prefix: tokens of one's own (100).")
    ] = None,
    input_tokens: Annotated[
        str | None, typer.Option("--input-tokens", metavar="N", help="preemption: of a prompt (64).")
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option("--output-tokens", metavar="N", help="prefix (50), preemption (64).")
    ] = None,
    outputs: Annotated[
        str | None, typer.Option("--outputs", metavar="N,N", help="batching: answers (100,50,200,30).")
    ] = None,
    rounds: Annotated[
        str | None, typer.Option("--rounds", metavar="N", help="batching: how often they come (3).")
    ] = None,
    num_gpu_blocks_override: Annotated[
        str | None,
        typer.Option("--num-gpu-blocks-override", metavar="N", help="preemption: blocks of the pool."),
    ] = None,
    gpu: shared.Gpu = None,
    dtype: shared.Dtype = None,
    quantization: shared.Quantization = None,
    kv_cache_dtype: shared.KvCacheDtype = None,
    block_size: shared.BlockSize = None,
    engine: shared.Engine = None,
    set: shared.Set = None,
    models: shared.Models = None,
    json: shared.Json = False,
) -> None:
    """The founding ideas of paged KV memory, worked through with a model's numbers."""
    from kvplan.jobs.explain import TOPICS, explain_with
    from kvplan.options import ExplainOptions

    if topic is None:
        questions = {name: about.question for name, about in TOPICS.items()}
        if json:
            shared.print_json({"topics": [{"topic": name, "question": q} for name, q in questions.items()]})
            return
        from kvplan.report.explain import print_topics
        from kvplan.report.tables import Screen

        print_topics(Screen(), questions)
        return
    found = explain_with(topic, shared.from_params(ExplainOptions, ctx.params))
    for warning in found.warnings:
        shared.warn(warning)
    if json:
        shared.print_json(found.to_dict())
        return
    from kvplan.report.explain import print_explanation
    from kvplan.report.tables import Screen

    print_explanation(Screen(), found)
