"""Finding a model or a GPU by what a user writes: a catalogue name, a path, a YAML file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvplan.catalogue import (
    Entry,
    check_fields,
    entry_names,
    find_entry,
    gpu_from_entry,
    read_catalogue,
    search_catalogue,
)
from kvplan.core.gpu import Gpu
from kvplan.core.model import ModelSpec
from kvplan.data import resource
from kvplan.errors import InputError, unknown_name, unreadable
from kvplan.hf_config import CATALOGUE_FIELDS, Origin, draft_layers, spec_from_config
from kvplan.safe_yaml import parse_value

#: The largest config.json seen is below a megabyte; parsed JSON may take twenty times its text.
_MAX_CONFIG_BYTES = 4 << 20
_YAML_SUFFIXES = (".yaml", ".yml")


def load_model(
    name: str, *, catalogue: Path | None = None, overrides: Sequence[str] = (), where: str = "MODEL"
) -> ModelSpec:
    """The model that ``name`` stands for.

    Tried in this order: a name, alias or Hugging Face id in the catalogue; ``file.yaml#name`` or a
    ``file.yaml`` with one model; a GGUF file; a config.json or a folder with one; ``org/name`` or
    ``org/name@revision`` on Hugging Face, from the local cache or fetched. ``catalogue`` replaces the
    shipped ``models.yaml``. ``overrides`` are texts ``key=value`` that replace fields; ``where`` is the
    argument that errors name. Raises `InputError`.
    """
    if not name.strip():
        raise InputError(
            "the name of the model is empty", where=where, hint="kvplan models lists those known"
        )
    changes = _parse_overrides(overrides)
    path_text, _, fragment = name.partition("#")
    if path_text.lower().endswith(_YAML_SUFFIXES):
        return _model_from_entry(_entry_of_file(Path(path_text), fragment), changes)
    entries = read_catalogue(catalogue) if catalogue else ()
    entry = find_entry(name, entries) if catalogue else search_catalogue(resource("models.yaml"), name)
    if entry is not None:
        return _model_from_entry(entry, changes)
    path = _model_path(name, where)
    if path is not None:
        return _model_from_gguf(path, changes) if _is_gguf(path) else _model_from_json(path, changes)
    model = _model_from_hub(name, changes, where) if "/" in name else None
    if model is not None:
        return model
    names = entry_names(entries or read_catalogue(resource("models.yaml")))
    error = unknown_name("model", name, names, where=where, listing="kvplan models")
    if "/" in name:
        error.hint = f"{error.hint}; pip install 'kvplan[hub]' lets models be fetched from Hugging Face"
    raise error


def list_models(catalogue: Path | None = None) -> tuple[ModelSpec, ...]:
    """Every model of the catalogue, in its order."""
    entries = read_catalogue(catalogue or resource("models.yaml"))
    return tuple(_model_from_entry(entry, {}) for entry in entries)


def load_gpu(name: str) -> Gpu:
    """The GPU of a name or alias in the shipped catalogue; raises `InputError`."""
    entry = search_catalogue(resource("gpus.yaml"), name)
    if entry is None:
        names = entry_names(read_catalogue(resource("gpus.yaml")))
        raise unknown_name("GPU", name, names, where="--gpu", listing="kvplan gpus")
    return gpu_from_entry(entry)


def list_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the shipped catalogue, in its order."""
    return tuple(gpu_from_entry(entry) for entry in read_catalogue(resource("gpus.yaml")))


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def _model_path(name: str, where: str) -> Path | None:
    """The config.json or GGUF file that a path means; None where the text is no path. Raises `InputError`."""
    path = Path(name)
    try:
        if path.is_dir():
            if (path / "config.json").is_file():
                return path / "config.json"
            raise InputError(
                f'the folder "{name}" has no config.json',
                where=where,
                hint="give the folder that a Hugging Face model was downloaded to",
            )
        if path.is_file():
            return path
        if path.exists():
            raise InputError(
                f'"{name[:60]}" is neither a file nor a folder', where=where, hint="check the path"
            )
    except OSError as error:
        raise InputError(
            f'cannot look for "{name[:60]}": {error.strerror}', where=where, hint="check the path"
        ) from None
    if path.suffix.lower() in (".json", ".gguf") or name.startswith(("/", "./", "../", "~")):
        raise InputError(f'no such file: "{name[:1000]}"', where=where, hint="check the path")
    return None


def _parse_overrides(overrides: Sequence[str]) -> dict[str, object]:
    changes: dict[str, object] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        where = f"--set {text}"
        if not equals or not key.strip():
            raise InputError(
                f'"{text}" is no key=value', where=where, hint="write --set num_hidden_layers=16"
            )
        changes[key.strip()] = parse_value(value, where=where)
    return changes


def _entry_of_file(path: Path, name: str) -> Entry:
    """The entry that ``file.yaml#name`` means; without a name the file must hold one."""
    entries = read_catalogue(path)
    names = [entry.name for entry in entries]
    if name:
        entry = find_entry(name, entries)
        if entry is None:
            raise unknown_name("model", name, entry_names(entries), where=str(path), listing=str(path))
        return entry
    if len(entries) != 1:
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise InputError(
            f"{path.name} holds {len(entries)} models",
            where=str(path),
            hint=f"say which: {path}#name, with {listed}" if names else "add one model to it",
        )
    return entries[0]


def _model_from_entry(entry: Entry, changes: Mapping[str, object]) -> ModelSpec:
    values, lines = entry.values(), entry.lines()
    origin = Origin(entry.file, entry.name, lines)
    check_fields(values, CATALOGUE_FIELDS, origin.of(), lines)
    source = values.get("source")
    return spec_from_config(
        values, origin=origin, source=str(source) if source else entry.file, overrides=changes
    )


def _model_from_json(path: Path, changes: Mapping[str, object]) -> ModelSpec:
    """The model of a config.json, with the weights that lie beside it."""
    from kvplan.safetensors import read_stored_weights  # only models in folders have such files

    text = _read_text(path)
    config = _parse_config(text, str(path))
    stored = None
    if path.name == "config.json":
        stored = read_stored_weights(path.parent, draft_layers=draft_layers(config))
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return spec_from_config(
        config,
        origin=Origin(str(path), name, _json_lines(text)),
        source=str(path),
        stored=stored,
        overrides=changes,
    )


def _model_from_hub(name: str, changes: Mapping[str, object], where: str) -> ModelSpec | None:
    """The model of a Hugging Face name, from the cache or else the network; None where neither can be had."""
    from kvplan.hub import cached_folder, can_fetch, fetch_model, parse_repo  # few models are named so
    from kvplan.safetensors import read_stored_weights

    repo = parse_repo(name)
    if repo is None:
        return None
    folder = cached_folder(repo)
    if folder is not None:
        source = str(folder / "config.json")
        text = _read_text(folder / "config.json")
    elif can_fetch():
        fetched = fetch_model(repo, max_config_bytes=_MAX_CONFIG_BYTES, where=where)
        source = fetched.source
        text = _as_text(fetched.config, source)
    else:
        return None
    config = _parse_config(text, source)
    drafts = draft_layers(config)
    return spec_from_config(
        config | {"hf_id": repo.id},
        origin=Origin(source, repo.name, _json_lines(text)),
        source=source,
        # The cache of a model that was only looked at has its config and some of its files.
        stored=read_stored_weights(folder, draft_layers=drafts, may_lack_files=True)
        if folder is not None
        else fetched.read_weights(drafts),
        overrides=changes,
    )


def _parse_config(text: str, where: str) -> dict[str, object]:
    """The fields of a config.json. Raises `InputError` naming the line."""
    from kvplan.safetensors import DuplicateKeyError, without_duplicates  # models in YAML need neither

    try:
        config = json.loads(text, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        raise InputError(
            f"the file is no JSON: {error.msg}",
            where=f"{where}:{error.lineno}",
            hint="mend the JSON in this line, or in the one before it",
        ) from None
    except DuplicateKeyError as error:
        raise InputError(
            f'duplicate key "{str(error)[:60]}"', where=where, hint="keep one of the two"
        ) from None
    except (RecursionError, ValueError) as error:
        # A number of thousands of digits, or thousands of brackets.
        raise InputError(
            f"the file cannot be read: {error}",
            where=where,
            hint="give a model's config.json: one JSON object",
        ) from None
    if not isinstance(config, dict):
        raise InputError(
            "the file holds no JSON object",
            where=where,
            hint="give a model's config.json: one JSON object",
        )
    return config


def _model_from_gguf(path: Path, changes: Mapping[str, object]) -> ModelSpec:
    """The model of a GGUF file, or of the first of several."""
    from kvplan.gguf import read_gguf, split_name  # few models are such files
    from kvplan.gguf_config import config_of, stored_weights

    model = read_gguf(path)
    config = config_of(model, where=str(path))
    return spec_from_config(
        config,
        origin=Origin(str(path), split_name(path) or path.stem),
        source=str(path),
        stored=stored_weights(model, config),
        overrides=changes,
    )


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise InputError(
                f"{path.name} is too large for a config.json",
                where=str(path),
                hint=f"give a model's config.json; the largest known have less than {_MAX_CONFIG_BYTES >> 20} MiB",
            )
        return _as_text(path.read_bytes(), str(path))
    except OSError as error:
        raise unreadable(error, where=str(path)) from None


def _as_text(raw: bytes, where: str) -> str:
    if raw.startswith(b"\xef\xbb\xbf"):  # transformers would not read it either
        raise InputError("it starts with a byte order mark", where=where, hint="save the file without one")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"byte {error.start} is no UTF-8", where=where, hint="save the file as UTF-8"
        ) from None


def _json_lines(text: str) -> dict[str, int]:
    """The line of each key that the file has once: json does not say where it read a value."""
    lines: dict[str, list[int]] = {}
    for line, content in enumerate(text.splitlines(), start=1):
        for key in re.findall(r'"(\w+)"\s*:', content):
            lines.setdefault(key, []).append(line)
    return {key: places[0] for key, places in lines.items() if len(places) == 1}
