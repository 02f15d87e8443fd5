"""Hostile model files: one clear error each, quickly, in little memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from model_files import write_gguf, write_holed
from toy_models import LLAMA_CONFIG

import kvplan
from kvplan.core.model import ModelSpec
from kvplan.errors import InputError
from kvplan.hf_config import FIELDS, Origin, spec_from_config

ROOT = Path(kvplan.__file__).resolve().parents[1]
GOOD = json.dumps(LLAMA_CONFIG)


def with_field(name: str, text: str) -> str:
    """The text of a config with a field whose value is written as given."""
    return (
        json.dumps({key: value for key, value in LLAMA_CONFIG.items() if key != name})[:-1]
        + f', "{name}": {text}}}'
    )


#: Texts of a config.json, and what the error must say.
TEXTS: dict[str, tuple[str | bytes, str]] = {
    "a huge number": (with_field("num_hidden_layers", "1" + "0" * 30), "num_hidden_layers is 1000"),
    "a number of five thousand digits": (with_field("vocab_size", "9" * 5000), "the file cannot be read"),
    "a negative number": (with_field("num_hidden_layers", "-5"), "num_hidden_layers is -5, below 1"),
    "a number beyond 64 bits": (with_field("hidden_size", str(2**64)), f"hidden_size is {2**64}, above"),
    "a fraction": (with_field("hidden_size", "64.5"), 'hidden_size is "64.5", not a whole number'),
    "not a number": (with_field("hidden_size", "NaN"), 'hidden_size is "nan", not a whole number'),
    "infinity": (with_field("hidden_size", "Infinity"), 'hidden_size is "inf", not a whole number'),
    "beyond floating point": (with_field("hidden_size", "1e400"), 'hidden_size is "inf", not a whole number'),
    "true": (with_field("hidden_size", "true"), 'hidden_size is "True", not a whole number'),
    "a word": (with_field("hidden_size", '"64"'), 'hidden_size is "64", not a whole number'),
    "a list": (with_field("hidden_size", "[64]"), 'hidden_size is "[64]", not a whole number'),
    "an object": (with_field("hidden_size", '{"a": 1}'), "hidden_size is "),
    "a key twice": (with_field("x", '1, "x": 2'), 'duplicate key "x"'),
    "an inner key twice": (with_field("rope_scaling", '{"type": 1, "type": 2}'), 'duplicate key "type"'),
    "a key twice after many": (
        "{" + "".join(f'"k{i}": 1, ' for i in range(100_000)) + '"k99999": 2}',
        'duplicate key "k99999"',
    ),
    "no UTF-8": (GOOD.encode().replace(b"Llama", b"Ll\xe4ma"), "is no UTF-8"),
    "UTF-16": (GOOD.encode("utf-16"), "is no UTF-8"),
    "a byte order mark": (GOOD.encode("utf-8-sig"), "it starts with a byte order mark"),
    "nothing": ("", "the file is no JSON"),
    "a zero byte": (GOOD + "\0", "the file is no JSON"),
    "two objects": (GOOD + GOOD, "the file is no JSON"),
    "a number alone": ("7", "the file holds no JSON object"),
    "null": ("null", "the file holds no JSON object"),
    "brackets": ("[" * 3_000_000, "the file cannot be read"),
    "objects in objects": ('{"a":' * 700_000, "the file cannot be read"),
    "ten megabytes of brackets": ("[" * 10_000_000, "too large for a config.json"),
    "lists in lists, closed": (
        with_field("hidden_size", "[" * 800 + "]" * 800),
        'hidden_size is "[[[[...]]]]", not a whole number',
    ),
    "a deep dtype": (with_field("dtype", "[" * 800 + "]" * 800), "unknown dtype"),
    "a deep architecture": (with_field("architectures", "[" * 800 + "]" * 800), "architectures is "),
    "a deep text_config": (
        with_field("text_config", '{"text_config": ' * 800 + "{}" + "}" * 800),
        "",
    ),
    "an architecture of a megabyte": (
        with_field("architectures", f'["{"L" * 1_000_000}"]'),
        'unknown architecture "LLLL',
    ),
    "a megabyte of layers": (
        with_field("layer_types", f"[{'1,' * 500_000}1]"),
        "layer_types names 500001 layers, num_hidden_layers is 2",
    ),
    "a megabyte of text": (with_field("hidden_size", f'"{"9" * 1_000_000}"'), "hidden_size is "),
}


def told(cli: Cli, model: str) -> str:
    """The one error that a model gives, which must be short and must say what would mend it."""
    outcome = cli("size", model)
    assert outcome.code == 2, outcome.err
    assert outcome.out == ""
    first, hint, *rest = outcome.err.splitlines()
    assert first.startswith("kvplan: error: ")
    assert hint
    assert not rest
    assert len(outcome.err) < 3000
    assert "Traceback" not in outcome.err
    return first


@pytest.mark.parametrize("stated", [str(10**400), "-5", "true"])
@pytest.mark.parametrize("name", ["original_max_position_embeddings", "rotary_dim"])
@pytest.mark.parametrize("version", ["0.19.0", "0.33.0"])
def test_a_length_of_rotary_positions_that_is_none_stays_within_bounds(
    cli: Cli, version: str, name: str, stated: str
) -> None:
    scaling = f'{{"rope_type": "yarn", "factor": 2.5, "{name}": {stated}}}'
    text = with_field("rope_scaling", scaling)
    Path("config.json").write_text(text)
    spec = spec_from_config(json.loads(text), origin=Origin("config.json", "x"), source="x")
    assert 0 < spec.weights.rotary_elements <= 16 * 10**9
    outcome = cli("size", "config.json", "--gpu", "h100", "--engine", f"vllm@{version}", "--json")
    assert outcome.code in (0, 1), outcome.err


@pytest.mark.parametrize(("text", "message"), TEXTS.values(), ids=TEXTS)
def test_a_hostile_config_is_one_error(cli: Cli, text: str | bytes, message: str) -> None:
    Path("config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    if message:
        assert message in told(cli, "config.json")
    else:
        assert cli("size", "config.json").code == 0


#: Values of every kind, most of them wrong for most fields.
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    10**40,
    0.5,
    float("nan"),
    float("-inf"),
    "",
    "full",
    "*M-E" * 3,
    [],
    [[]],
    [0, 1],
    [None, None],
    [True, False],
    ["full_attention", "linear_attention"],
    ["sliding_attention", "mamba"],
    [{}],
    [{"kind": "full", "layers": 1}],
    {},
    {"a": {"b": []}},
    {"kv_n_heads": -1, "quant_method": [], "type": 7, "rope_type": {}},
    {"quant_method": "fp8", "type": "yarn", "factor": "x"},
]


def read_or_refused(config: dict[str, object]) -> ModelSpec | InputError:
    try:
        return spec_from_config(config, origin=Origin("config.json", "m"), source="config.json")
    except InputError as error:
        return error


@pytest.mark.parametrize("name", sorted(FIELDS))
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MptForCausalLM", "NemotronHForCausalLM"])
def test_any_value_of_any_field_is_read_or_refused(name: str, architecture: str) -> None:
    for value in VALUES:
        for inner in (False, True):
            config: dict[str, object] = {**LLAMA_CONFIG, "architectures": [architecture]}
            if inner:
                config["text_config"] = {name: value}
            else:
                config[name] = value
            read = read_or_refused(config)
            if isinstance(read, InputError):
                assert read.where
                assert len(str(read)) < 1000
            else:
                assert read.num_layers >= 1
                assert read.weights.parameters is None or read.weights.parameters > 0


YAMLS: dict[str, tuple[str | bytes, str]] = {
    "an alias in itself": (
        "m: &a {architectures: [LlamaForCausalLM], rope_scaling: *a}\n",
        "contains itself",
    ),
    "a text_config in itself": (
        "m: &a {architectures: [LlamaForCausalLM], text_config: *a}\n",
        "contains itself",
    ),
    "aliases of aliases": (
        "m:\n  a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
        "the entry holds more than 100,000 values",
    ),
    "brackets": ("m: " + "[" * 1_000_000, "nest"),
    "dashes": ("- " * 500_000, "nest"),
    "a key twice": ("m: {hidden_size: 1, hidden_size: 2}\n", 'duplicate key "hidden_size"'),
    "a Python object": ("m: !!python/object/apply:os.system [ls]\n", "m.yaml:1"),
    "no UTF-8": (b"m: {family: \xff}\n", "not UTF-8"),
    "infinity": ("m: {hidden_size: .inf}\n", "is no plain number"),
    "not a number": ("m: {hidden_size: .nan}\n", "is no plain number"),
    "beyond floating point": (
        "m: {architectures: [LlamaForCausalLM], hidden_size: 1.0e+400}\n",
        "hidden_size",
    ),
    "a long number": (f"m: {{hidden_size: {'9' * 5000}}}\n", "is no plain decimal number"),
    "three megabytes": ("m: [" + "[]," * 1_000_000 + "]", "the file is larger than 2 MiB"),
    "nothing": ("", "the file is empty"),
}


@pytest.mark.parametrize(("text", "message"), YAMLS.values(), ids=YAMLS)
def test_a_hostile_catalogue_is_one_error(cli: Cli, text: str | bytes, message: str) -> None:
    Path("m.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in told(cli, "m.yaml")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [pipe, device, folder, loop])
@pytest.mark.parametrize("name", ["config.json", "m.json", "m.gguf", "m.yaml", "org/m", "m/config.json", "m"])
def test_what_is_no_file_is_not_opened(cli: Cli, make: Callable[[Path], None], name: str) -> None:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    make(path)
    told(cli, name)
    if path.parent != Path():
        told(cli, str(path.parent))


@pytest.mark.parametrize("make", [pipe, device, folder])
def test_weights_that_are_no_files_are_not_opened(cli: Cli, make: Callable[[Path], None]) -> None:
    Path("config.json").write_text(GOOD)
    make(Path("model.safetensors.index.json"))
    assert cli("size .").code == 0
    Path("model.safetensors.index.json").unlink() if make is not folder else Path(
        "model.safetensors.index.json"
    ).rmdir()
    make(Path("model.safetensors"))
    assert cli("size .").code == 0


@pytest.mark.parametrize(
    "name", ["a" * 5000, "a/" * 2000, "\0", "a\0b.json", "../" * 1000 + "x", "org/" + "é" * 300]
)
def test_a_name_that_no_file_can_have_is_one_error(cli: Cli, name: str) -> None:
    told(cli, name)


SMALL: list[tuple[str, str, list[int]]] = [("token_embd.weight", "F16", [64, 100])]


def huge_config(folder: Path) -> str:
    write_holed(folder / "config.json", b"{", 200 << 20)
    return "config.json"


def large_config(folder: Path) -> str:
    (folder / "config.json").write_text(with_field("x", f"[{'[],' * 1_300_000}[]]"))
    return "config.json"


def huge_yaml(folder: Path) -> str:
    write_holed(folder / "m.yaml", b"m: {}", 10 << 30)
    return "m.yaml"


def large_yaml(folder: Path) -> str:
    (folder / "m.yaml").write_text(f"m: [{'[],' * 300_000}]")
    return "m.yaml"


def claims_in_safetensors(folder: Path) -> str:
    (folder / "config.json").write_text(GOOD)
    write_holed(folder / "model.safetensors", (2**60).to_bytes(8, "little"), 1 << 40)
    return "."


def lists_in_safetensors(folder: Path) -> str:
    (folder / "config.json").write_text(GOOD)
    header = b'{"a":[' + b"[]," * 16_000_000 + b"[]]}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return "."


def huge_index(folder: Path) -> str:
    (folder / "config.json").write_text(GOOD)
    write_holed(folder / "model.safetensors.index.json", b"{", 10 << 30)
    return "."


def tokens_in_gguf(folder: Path) -> str:
    metadata = {"general.architecture": "llama", "tokens": ["a"]}
    start = write_gguf(folder / "m.gguf", metadata, SMALL).read_bytes()
    at = start.index(b"tokens") + len("tokens") + 8
    write_holed(folder / "m.gguf", start[:at] + (2**40).to_bytes(8, "little"), 1 << 40)
    return "m.gguf"


def keys_in_gguf(folder: Path) -> str:
    metadata = {f"general.key{i}": list(range(1000)) for i in range(3000)}
    write_gguf(folder / "m.gguf", metadata, SMALL)
    return "m.gguf"


@pytest.mark.parametrize(
    "write",
    [
        huge_config,
        large_config,
        huge_yaml,
        large_yaml,
        claims_in_safetensors,
        lists_in_safetensors,
        huge_index,
        tokens_in_gguf,
        keys_in_gguf,
    ],
)
def test_a_large_file_takes_little_memory(tmp_path: Path, write: Callable[[Path], str]) -> None:
    model = write(tmp_path)
    limit = 600 << 20
    child = subprocess.run(
        [sys.executable, "-m", "kvplan", "size", model, "--json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in child.stderr
    document = json.loads(child.stdout)
    # The one that is only long is a model, the others are wrong.
    assert child.returncode == (0 if write is large_config else 2)
    assert ("error" in document) == (child.returncode == 2)
