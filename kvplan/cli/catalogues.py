"""`kvplan models` and `kvplan gpus`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvplan.cli import options as shared


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("models", epilog="Example: kvplan models llama-3.1-8b")(models)
    app.command("gpus", epilog="Example: kvplan gpus h100-80gb")(gpus)


def models(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show one model in full.")] = None,
    models: shared.Models = None,
    json: shared.Json = False,
) -> None:
    """The models that kvplan knows by name."""
    from pathlib import Path

    from kvplan.config import list_models, load_model

    catalogue = Path(models) if models else None
    if name is not None:
        spec = load_model(name, catalogue=catalogue)
        record = {**spec.to_dict(), "hf_id": spec.hf_id, "aliases": list(spec.aliases), "dtype": spec.dtype}
        record |= {"architecture": spec.architecture, "vocab_size": spec.vocab_size, "source": spec.source}
        if json:
            shared.print_json({"model": record})
            return
        from kvplan.report.catalogues import print_record
        from kvplan.report.tables import Screen

        print_record(Screen(), record)
        return
    known = list_models(catalogue)
    if json:
        shared.print_json(
            {
                "models": [
                    {**m.to_dict(), "hf_id": m.hf_id, "aliases": list(m.aliases), "source": m.source}
                    for m in known
                ]
            }
        )
        return
    from kvplan.report.catalogues import print_models
    from kvplan.report.tables import Screen

    print_models(Screen(), known)


def gpus(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show one GPU in full.")] = None,
    json: shared.Json = False,
) -> None:
    """The GPUs that kvplan knows by name."""
    from kvplan.config import list_gpus, load_gpu

    if name is not None:
        record = load_gpu(name).to_dict()
        if json:
            shared.print_json({"gpu": record})
            return
        from kvplan.report.catalogues import print_record
        from kvplan.report.tables import Screen

        print_record(Screen(), record)
        return
    known = list_gpus()
    if json:
        shared.print_json({"gpus": [gpu.to_dict() for gpu in known]})
        return
    from kvplan.report.catalogues import print_gpus
    from kvplan.report.tables import Screen

    print_gpus(Screen(), known)
