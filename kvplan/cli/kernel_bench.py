"""`kvplan kernel-bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from kvplan.cli import options as shared
from kvplan.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "kernel-bench",
        cls=shared.LightCommand,
        epilog="Example: kvplan kernel-bench --heads 32 --kv-heads 8 --batch 1,8,64 --seq 4096,16384",
    )(kernel_bench)


def kernel_bench(
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="LIST", help="Of queries: bfloat16, float16, float32.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option("--kv-cache-dtype", metavar="LIST", help="auto (as --dtype) or fp8_e4m3.")
    ] = None,
    heads: Annotated[str | None, typer.Option("--heads", metavar="LIST", help="Query heads (32).")] = None,
    kv_heads: Annotated[str | None, typer.Option("--kv-heads", metavar="LIST", help="KV heads (8).")] = None,
    head_dim: Annotated[
        str | None, typer.Option("--head-dim", metavar="LIST", help="Elements of a head (128).")
    ] = None,
    block_size: Annotated[
        str | None, typer.Option("--block-size", metavar="LIST", help="Tokens of a block (16).")
    ] = None,
    batch: Annotated[str | None, typer.Option("--batch", metavar="LIST", help="Sequences (32).")] = None,
    seq: Annotated[
        str | None, typer.Option("--seq", metavar="LIST", help="Tokens of each sequence (4096).")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Take heads and their size from a model.")
    ] = None,
    tensor_parallel_size: shared.TensorParallelSize = None,
    kernel: Annotated[
        str | None, typer.Option("--kernel", metavar="LIST", help="all, naive, split or mma (all).")
    ] = None,
    step: Annotated[
        bool, typer.Option("--step", help="Time one decode step's attention over all layers of --model.")
    ] = False,
    validate_only: Annotated[bool, typer.Option("--validate-only", help="Do not time.")] = False,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile by NVRTC and say what is taken; needs no GPU.")
    ] = False,
    arch: Annotated[
        str | None, typer.Option("--arch", metavar="LIST", help="With --compile-only: such as 80,90 (all).")
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Validate on the CPU with a C++ compiler; needs no GPU.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="LIST", help="Time flashinfer, torch, flash-attn, vllm too."),
    ] = None,
    picture: Annotated[
        str | None, typer.Option("--picture", metavar="OUT.(png|svg)", help="Bandwidth over KV bytes.")
    ] = None,
    models: shared.Models = None,
    json: shared.Json = False,
) -> None:
    """Validate the paged-attention kernels on this GPU, and time them beside its memory's bandwidth."""
    from kvplan.jobs.kernel_bench import KernelBenchOptions, kernel_bench_with
    from kvplan.units import parse_count

    options = KernelBenchOptions(
        dtype=_names(dtype, "--dtype"),
        kv_cache_dtype=_names(kv_cache_dtype, "--kv-cache-dtype"),
        heads=_counts(heads, "--heads"),
        kv_heads=_counts(kv_heads, "--kv-heads"),
        head_dim=_counts(head_dim, "--head-dim"),
        block_size=_counts(block_size, "--block-size"),
        batch=_counts(batch, "--batch"),
        seq=_counts(seq, "--seq"),
        model=model,
        models=models,
        tensor_parallel_size=parse_count(
            "1" if tensor_parallel_size is None else tensor_parallel_size, where="--tensor-parallel-size"
        ),
        kernel=_names(kernel, "--kernel"),
        against=_names(against, "--against"),
        arch=_counts(arch, "--arch"),
        validate_only=validate_only,
        compile_only=compile_only,
        emulate=emulate,
        step=step,
    )
    if picture is not None:
        from kvplan.output import check_output_paths
        from kvplan.plots import check_picture

        check_output_paths({"--picture": picture}, sources=[path for path in (model, models) if path])
        if options.mode != "time":
            raise InputError("a picture is of times", where="--picture", hint="leave it out")
        check_picture(picture, "--picture")
    result = kernel_bench_with(options, _progress())
    if json:
        shared.print_json(result.to_dict())
    else:
        from kvplan.report.kernel_bench import print_kernel_bench
        from kvplan.report.tables import Screen

        print_kernel_bench(Screen(), result)
    if picture is not None and not result.is_partial:
        from kvplan.output import whole_path
        from kvplan.plots import draw_bandwidths

        with whole_path(picture) as path:
            draw_bandwidths(path, result.results)
    if result.is_partial:
        raise typer.Exit(130)
    if not result.is_good:
        raise typer.Exit(1)


def _names(text: str | None, where: str) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise InputError("the list is empty", where=where, hint="name at least one, or leave the flag out")
    return names


def _counts(text: str | None, where: str) -> tuple[int, ...]:
    from kvplan.units import parse_count

    return tuple(parse_count(part, where=where) for part in _names(text, where))


def _progress() -> Callable[[int, int, str], None] | None:
    """A line that is written over, on a terminal."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int, what: str) -> None:
        text = f"{done} of {total} {what}" if what else ""
        sys.stderr.write(f"\r{text[:100]:<100}" if text else f"\r{'':100}\r")
        sys.stderr.flush()

    return show
