"""`size --from` and `from:` in a check: deployments sized, and failures that point at their lines."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from command_line import Cli

from kvplan.errors import InputError
from kvplan.jobs.check import read_checks

SCRIPT = "#!/bin/sh\nLENGTH=2048\nvllm serve llama-2-13b -tp 2 \\\n  --max-model-len $LENGTH --port 80\n"
COMPOSE = """\
services:
  chat:
    image: vllm/vllm-openai
    command:
      - --model=llama-2-13b
      - --max-model-len=4096
    deploy: {resources: {reservations: {devices: [{count: 2}]}}}
"""
CHECKS = """\
version: 1
engine: vllm@0.33
checks:
  - name: what we ship
    from: ../deploy/compose.yaml
    gpu: l4
    expect:
      fits: true
      config.max_model_len.value: 4096
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    for name, text in {"serve.sh": SCRIPT, "deploy/compose.yaml": COMPOSE, "ci/c.yaml": CHECKS}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_size_takes_model_and_flags_from_a_file(cli: Cli) -> None:
    outcome = cli("size --from serve.sh --gpu a100-80gb --json")
    assert outcome.code == 0
    document = outcome.document
    assert document["model"]["name"] == "llama-2-13b"
    assert document["config"]["tensor_parallel_size"] == {"value": 2, "source": "serve.sh:3:28"}
    assert document["config"]["max_model_len"] == {"value": 2048, "source": "serve.sh:2:1"}
    assert outcome.err == "kvplan: warning: ignored in serve.sh: --port\n"


def test_what_is_given_beside_the_file_wins(cli: Cli) -> None:
    document = cli("size llama-2-7b --from serve.sh --max-model-len 1024 --json").document
    assert document["model"]["name"] == "llama-2-7b"
    assert document["config"]["max_model_len"] == {"value": 1024, "source": "--max-model-len"}


def test_seq_never_sets_the_length_of_a_deployment(cli: Cli, folder: Path) -> None:
    config = (
        "m: {architectures: [BloomForCausalLM], hidden_size: 64, n_head: 4, n_layer: 2, vocab_size: 100}\n"
    )
    (folder / "m.yaml").write_text(config)
    (folder / "s.sh").write_text("vllm serve m.yaml\n")
    assert cli("size m.yaml --seq 128").code == 0
    outcome = cli("size --from s.sh --seq 128")
    assert outcome.code == 2
    assert outcome.err.startswith("kvplan: error: the model states no maximum length ")
    assert cli("size --from s.sh --seq 128 --max-model-len 256").code == 0


def test_a_number_of_gpus_that_does_not_match_is_a_warning(cli: Cli) -> None:
    outcome = cli("size --from deploy/compose.yaml#chat --gpu a100-80gb")
    assert outcome.code == 0
    assert outcome.err == ("kvplan: warning: deploy/compose.yaml: the command needs 1 GPUs and is given 2\n")
    assert cli("size --from deploy/compose.yaml --gpu a100-80gb -tp 2").err == ""


def test_a_manifest_comes_through_a_pipe(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(COMPOSE.encode())))
    document = cli("size --from - --json").document
    assert document["config"]["max_model_len"] == {"value": 4096, "source": "standard input:6:9"}


def test_annotations_point_at_the_deployment(cli: Cli) -> None:
    outcome = cli("check ci/c.yaml --output-format github")
    assert outcome.code == 1
    assert outcome.out.splitlines() == [
        "::error file=deploy/compose.yaml,line=5,col=9,title=what we ship::"
        "fits is false, expected true (ci/c.yaml:8)",
        "::notice::0 of 1 capacity checks pass",
    ]


def test_the_table_names_the_line_of_the_deployment(cli: Cli) -> None:
    outcome = cli("check ci/c.yaml")
    assert "what we ship: see deploy/compose.yaml:5 (ci/c.yaml:8)" in outcome.out


def test_json_and_junit_name_the_line_of_the_deployment(cli: Cli, folder: Path) -> None:
    outcome = cli("check ci/c.yaml --json --junit j.xml")
    first, second = outcome.document["checks"][0]["verdicts"]
    assert first["deployment"] == {"file": "deploy/compose.yaml", "line": 5, "column": 9}
    assert (first["line"], second["passed"]) == (8, True)
    failure = ET.parse(folder / "j.xml").getroot()[0][0][0]
    assert failure.text == (
        "ci/c.yaml:8:7: fits is false, expected true (the command at deploy/compose.yaml:5)"
    )


@pytest.mark.parametrize(
    ("more", "expect"),
    [
        ("model: llama-2-7b", "model.name: llama-2-7b"),
        ("max_model_len: 1024", "config.max_model_len.value: 1024"),
        ("ignore_flags: [max-model-len]", "config.max_model_len.source: 'check file, defaults'"),
    ],
)
def test_the_keys_of_a_check_win_over_the_deployment(cli: Cli, folder: Path, more: str, expect: str) -> None:
    (folder / "c.yaml").write_text(
        "version: 1\nengine: vllm@0.33\ndefaults: {max_model_len: 512}\n"
        f"checks: [{{from: deploy/compose.yaml, gpu: h100-80gb, {more}, expect: {{{expect}}}}}]\n"
    )
    outcome = cli("check c.yaml")
    assert (outcome.code, outcome.err) == (0, "")


def test_a_report_cannot_replace_the_deployment(cli: Cli, folder: Path) -> None:
    before = (folder / "deploy/compose.yaml").read_bytes()
    assert cli("check ci/c.yaml --junit deploy/compose.yaml").code == 2
    assert (folder / "deploy/compose.yaml").read_bytes() == before


def test_a_simulation_of_a_deployment(cli: Cli, folder: Path) -> None:
    (folder / "c.yaml").write_text(
        "version: 1\nengine: vllm@0.33\nchecks:\n"
        "  - {from: serve.sh, trace: chat, limit: 3, gpu: a100-80gb, expect: {requests.total: 3}}\n"
    )
    assert cli("check c.yaml").code == 0


def test_an_error_of_the_deployment_names_both_files(folder: Path) -> None:
    (folder / "deploy/compose.yaml").write_text(COMPOSE.replace("max-model-len=4096", "cpu-offload-gb=4"))
    with pytest.raises(InputError) as caught:
        read_checks(str(folder / "ci/c.yaml"))
    assert caught.value.what == "--cpu-offload-gb is not handled and may change memory"
    assert f"{folder}/ci/c.yaml:5:11, {folder}/deploy/compose.yaml:6:9" in str(caught.value)


def test_names_of_a_deployment_are_shown_literally(cli: Cli, folder: Path) -> None:
    service = r'"a\x1b[31m": {image: vllm/vllm-openai, command: "--model \x1b[2J"}'
    (folder / "evil.yaml").write_text(f"services: {{{service}, b: {{command: vllm serve x}}}}\n")
    for command in ("size --from evil.yaml", r"size --from evil.yaml#1", "size --from 'evil.yaml#\x1b'"):
        outcome = cli(command)
        assert outcome.code == 2
        assert all(c.isprintable() or c == "\n" for c in outcome.out + outcome.err)


def test_overrides_of_the_command_reach_the_model(cli: Cli) -> None:
    overrides = '{"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "num_hidden_layers": 4}'
    command = f"vllm serve llama-2-13b --hf-overrides '{overrides}' --max-model-len 16384"
    outcome = cli("size --json --vllm-command", command)
    assert outcome.code == 0, outcome.err
    assert outcome.document["model"]["num_layers"] == 4
    assert "positions are stretched" in outcome.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--max-model-len -5", "-5 is out of range (s.sh:1:40, --max-model-len)"),
        (
            "--max-model-len 9000000",
            "4,096 tokens that the engine lets the model have (s.sh:1:40, --max-model-len)",
        ),
        ("-tp 3", "cannot be divided among 3 ranks (s.sh:1:28, --tensor-parallel-size)"),
    ],
)
def test_a_value_that_is_refused_is_pointed_at_in_its_file(cli: Cli, text: str, said: str) -> None:
    Path("s.sh").write_text(f"vllm serve llama-2-13b {text}\n")
    outcome = cli("size --from s.sh --gpu h100")
    assert outcome.code == 2
    assert said in outcome.err


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.11.0", "0.11"),
        ("registry:5000/team/vllm-cu12:0.24.1-x86_64@sha256:abc", "0.24"),
        ("vllm/vllm-openai:v0.1.0", "0.6"),
        ("vllm/vllm-openai:v0.33.0", None),
        ("vllm/vllm-openai:latest", None),
        ("vllm/vllm-openai", None),
        ("team/other:0.11", None),
    ],
)
def test_an_image_of_another_version_is_said(cli: Cli, image: str, version: str | None) -> None:
    command = f"docker run {image} vllm serve llama-2-13b"
    said = cli("size --vllm-command", command).err
    assert said == "" if version is None else f"give --engine vllm@{version}" in said
    assert "--engine" not in cli("size --engine vllm@0.24 --vllm-command", command).err
