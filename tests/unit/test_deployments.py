"""Deployments: which command of a file starts vLLM, with which options, and at which line each stands."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from kvplan.deployments import read_deployment
from kvplan.errors import InputError
from kvplan.options import SizeOptions
from kvplan.vllm_command import VllmCommand

SCRIPT = """\
#!/usr/bin/env bash
set -euo pipefail
MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
TP=${TP:-2}
export VLLM_LOGGING_LEVEL=INFO
ARGS=(
  --max-model-len 32K   # tokens
)
if [ -n "${DEBUG:-}" ]; then
  echo "vllm serve $MODEL"
fi
exec numactl --membind 0 vllm serve "$MODEL" \\
  --tensor-parallel-size "$TP" \\
  "${ARGS[@]}" --port ${PORT:-8000} "$@" 2>&1 | tee log.txt
"""
COMPOSE = """\
x-common: &common
  image: vllm/vllm-openai:v0.33.0
  environment:
    - HF_TOKEN
    - VLLM_USE_V1=1
services:
  proxy:
    image: nginx
  chat:
    <<: *common
    command: >
      --model meta-llama/Llama-3.1-8B-Instruct
      --tensor-parallel-size ${TP:-2}
      --max-model-len 8192
    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]}}}
  code:
    <<: *common
    command: ["--model", "Qwen/Qwen2.5-7B-Instruct", "--max-model-len", "4096"]
    environment: {VLLM_USE_V1: "0"}
"""
MANIFEST = """\
---
# Source: chart/config.yaml
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data:
  TP: "4"
---
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: llama
spec:
  template:
    spec:
      containers:
        - name: sidecar
          image: envoy
        - name: vllm
          image: vllm/vllm-openai:latest
          envFrom: [{configMapRef: {name: settings}}]
          env:
            - name: MODEL
              value: meta-llama/Llama-3.1-70B-Instruct
          command: ["/bin/sh", "-c"]
          args:
            - |
              echo starting
              vllm serve $(MODEL) \\
                --tensor-parallel-size ${TP} \\
                --max-model-len 16384
          resources: {limits: {nvidia.com/gpu: 8}}
"""
LIST = """\
apiVersion: v1
kind: List
items:
- kind: LeaderWorkerSet
  metadata: {name: big}
  spec:
    leaderWorkerTemplate:
      size: 2
      leaderTemplate:
        spec:
          containers:
          - name: vllm
            command: [sh, -c, "ray start --head; vllm serve llama-3.1-70b -tp 8 -pp 2"]
            resources: {limits: {nvidia.com/gpu: "8"}}
      workerTemplate:
        spec: {containers: [{name: vllm, command: [sh, -c, "ray start --block"]}]}
- kind: StatefulSet
  metadata: {name: small}
  spec:
    template:
      spec:
        containers:
        - name: vllm
          image: vllm/vllm-openai
          args: [--model, llama-3.1-8b, --gpu-memory-utilization=0.85]
- kind: InferenceService
  metadata: {name: served}
  spec:
    predictor:
      model:
        modelFormat: {name: huggingface}
        storageUri: hf://meta-llama/Llama-3.1-8B-Instruct
        args: ["--model_name=llama3", "--max-model-len=4096"]
        resources: {requests: {nvidia.com/gpu: "1"}}
"""
CONFIG = """\
model: llama-2-13b
tensor-parallel-size: 2
enforce_eager: true
enable-prefix-caching: false
served-model-name: [a, b]
speculative-config: {method: ngram, num_speculative_tokens: 3}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with one deployment of each kind."""
    files = {
        "start.sh": SCRIPT,
        "compose.yaml": COMPOSE,
        "k8s.yaml": MANIFEST,
        "list.yaml": LIST,
        "c.yaml": CONFIG,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(command: VllmCommand) -> dict[str, str]:
    """File and line of each option."""
    return {name: place.rpartition(":")[0] for name, place in command.where.items()}


def test_a_script_with_variables() -> None:
    command = read_deployment("start.sh")
    assert command.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert dict(command.values) == {"tensor_parallel_size": 2, "max_model_len": 32768}
    assert lines(command) == {"tensor_parallel_size": "start.sh:4", "max_model_len": "start.sh:7"}
    assert command.place is not None
    assert command.place[:2] == ("start.sh", 12)
    assert command.ignored == ("--port",)
    assert command.fill(SizeOptions())["max_model_len"] == "start.sh:7:19"


def test_a_service_of_a_compose_file() -> None:
    command = read_deployment("compose.yaml#chat")
    assert command.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert dict(command.values) == {"tensor_parallel_size": 2, "max_model_len": 8192}
    assert lines(command) == {"tensor_parallel_size": "compose.yaml:13", "max_model_len": "compose.yaml:14"}
    options = SizeOptions()
    command.fill(options)
    assert command.warnings(options) == ("compose.yaml: the command needs 2 GPUs and is given 1",)


def test_a_variable_of_a_service_is_its_environment() -> None:
    with pytest.raises(InputError) as caught:
        read_deployment("compose.yaml#code")
    assert str(caught.value) == (
        "the variable VLLM_USE_V1 is not handled and may change memory (compose.yaml:19:32)"
    )
    command = read_deployment("compose.yaml#2", ignored_flags=["VLLM_USE_V1"])
    assert (command.model, dict(command.values)) == ("Qwen/Qwen2.5-7B-Instruct", {"max_model_len": 4096})


def test_a_container_of_a_manifest() -> None:
    command = read_deployment("k8s.yaml")
    assert command.model == "meta-llama/Llama-3.1-70B-Instruct"
    assert dict(command.values) == {"tensor_parallel_size": 4, "max_model_len": 16384}
    assert lines(command) == {"tensor_parallel_size": "k8s.yaml:7", "max_model_len": "k8s.yaml:32"}
    options = SizeOptions(gpu="8xh100-80gb", tensor_parallel_size=8)
    command.fill(options)
    assert options.tensor_parallel_size == 8
    assert command.warnings(options) == ()


def test_pods_of_one_replica_count_together() -> None:
    command = read_deployment("list.yaml#big")
    assert dict(command.values) == {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    assert command.gpu_count == 16


def test_a_model_that_kserve_runs() -> None:
    command = read_deployment("list.yaml#served")
    assert command.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert dict(command.values) == {"max_model_len": 4096}
    assert (command.ignored, command.gpu_count) == (("--model_name",), 1)


def test_a_configuration_of_vllm() -> None:
    command = read_deployment("c.yaml")
    assert command.model == "llama-2-13b"
    assert dict(command.values) == {
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "speculative_method": "ngram",
        "num_speculative_tokens": 3,
    }
    assert lines(command)["speculative_method"] == "c.yaml:6"


def test_the_command_wins_over_the_configuration_that_it_names(folder: Path) -> None:
    (folder / "s.sh").write_text("vllm serve --config c.yaml --tensor-parallel-size 4\n")
    command = read_deployment("s.sh")
    assert command.model == "llama-2-13b"
    assert command.values["tensor_parallel_size"] == 4
    assert lines(command)["tensor_parallel_size"] == "s.sh:1"
    assert lines(command)["enforce_eager"] == "c.yaml:3"
    (folder / "s.sh").write_text("vllm serve llama-3.1-8b --config=c.yaml\n")
    assert read_deployment("s.sh").model == "llama-3.1-8b"


def test_a_rendered_chart_comes_on_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(MANIFEST.encode()))
    monkeypatch.setattr(sys, "stdin", stream)
    command = read_deployment("-#llama")
    assert command.values["tensor_parallel_size"] == 4
    assert lines(command)["max_model_len"] == "standard input:32"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind: Pod\nspec: {containers: [{name: a, image: vllm/vllm-openai, args: [m/n, -tp, '2']}]}", "m/n"),
        ("kind: CronJob\nspec: {jobTemplate: {template: {spec: {containers: [command: [vllm, serve, x]]}}}}", "x"),
        ("services: {a: {entrypoint: vllm serve, command: x --dtype auto}}", "x"),
        ("services: {a: {entrypoint: [python3, -m, vllm.entrypoints.openai.api_server], command: [--model, x]}}", "x"),
        ("services: {a: {image: '${IMAGE:-vllm/vllm-openai}', command: --model x}}", "x"),
        ('services:\n  a:\n    image: vllm/vllm-openai\n    command: "--model\n      x"\n', "x"),
        ("model_tag: x\n", "x"),
        ('{"model": "x"}', "x"),
    ],
)  # fmt: skip
def test_commands_stand_in_many_places(folder: Path, text: str, expected: str) -> None:
    (folder / "d.yaml").write_text(text)
    assert read_deployment("d.yaml").model == expected


@pytest.mark.parametrize("style", ["|", ">", "|-", "", "'", '"'])
def test_lines_inside_a_text_are_found_in_every_style(folder: Path, style: str) -> None:
    body = "vllm serve llama-2-13b\n        --max-model-len 2048\n        --block-size 32"
    quote = style if style in ("'", '"') else ""
    head = "" if style in ("'", '"') else style + "\n        " if style else ""
    if style.startswith("|"):
        body = body.replace("\n", " \\\n")
    (folder / "d.yaml").write_text(
        f"kind: Pod\nspec:\n  containers:\n  - command:\n    - bash\n    - -c\n    - {head}{quote}{body}{quote}\n"
    )
    first = 8 if head else 7
    assert lines(read_deployment("d.yaml")) == {
        "max_model_len": f"d.yaml:{first + 1}",
        "block_size": f"d.yaml:{first + 2}",
    }


@pytest.mark.parametrize(
    ("source", "what", "hint"),
    [
        ("compose.yaml", "2 commands of the file start vLLM", "say which: compose.yaml#chat, compose.yaml#code"),
        ("list.yaml", "3 commands of the file", "say which: list.yaml#big, list.yaml#small, list.yaml#served"),
        ("list.yaml#vllm", 'several are called "vllm"', "say which: list.yaml#big, list.yaml#small"),
        ("k8s.yaml#sidecar", '"sidecar" does not start vLLM', "these do: k8s.yaml#vllm"),
        ("k8s.yaml#vlm", 'unknown container "vlm"', "did you mean vllm"),
        ("none.yaml", "cannot read the file: No such file or directory", "give a file that exists"),
        (".", "cannot read the file: Is a directory", "give a file that exists"),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_made_lists_what_there_is(source: str, what: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        read_deployment(source)
    assert caught.value.what.startswith(what)
    assert (caught.value.hint or "").startswith(hint)


def test_a_variable_that_is_not_set_is_named_with_its_line(folder: Path) -> None:
    (folder / "s.sh").write_text("vllm serve \\\n  $MODEL \\\n  --max-model-len $LENGTH $EXTRA\n")
    with pytest.raises(InputError) as caught:
        read_deployment("s.sh")
    assert str(caught.value) == "$EXTRA is not set in the script, or not to one value (s.sh:3:27)"
    assert caught.value.hint == "set it in the script, or pass --ignore-flag EXTRA"
    command = read_deployment("s.sh", ignored_flags=["EXTRA"])
    assert set(command.unread) == {"model", "max_model_len"}
    with pytest.raises(InputError) as caught:
        command.fill(SizeOptions())
    assert str(caught.value) == (
        "$LENGTH is not set in the script, or not to one value (s.sh:3:19, --max-model-len)"
    )


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("one-line.sh", b"vllm serve m " + b"--port 1 " * (10 << 17)),
        ("long.sh", b"vllm serve m '" + b"a" * (1 << 19) + b"'"),
        ("binary.sh", bytes(range(256)) * 100),
        ("latin.sh", b"vllm serve \xff"),
        ("empty.sh", b" \n\n"),
        ("huge.yaml", b"a: " + b"x" * (5 << 20)),
        ("deep.yaml", b"[" * 100_000),
        ("deep-maps.yaml", b"kind: a\nspec: " + b"{a: " * 900 + b"1" + b"}" * 900),
        ("cycle.yaml", b"kind: P\nspec: &a\n  containers: [*a]\n  x: *a\n"),
        ("merge-cycle.yaml", b"kind: P\nspec: &a\n  <<: *a\n"),
        ("service-cycle.yaml", b"services: &a\n  a: {command: *a}\n"),
        ("laughs.yaml", b"a: &a0 {x: {}}\nkind: P\n"
         + b"".join(b"b%d: &a%d [%s]\n" % (i, i + 1, b", ".join([b"*a%d" % i] * 10)) for i in range(9))
         + b"spec: *a9\n"),
        ("merged-laughs.yaml", b"x0: &a0 {k: v}\n"
         + b"".join(b"x%d: &a%d {<<: [%s]}\n" % (i + 1, i + 1, b", ".join([b"*a%d" % i] * 10)) for i in range(9))
         + b"services: {a: *a9}\n"),
        ("repeated.yaml", b"x: &c '" + b"--port 1 " * 10_000 + b"'\nservices:\n"
         + b"".join(b"  s%d: {image: vllm/vllm, command: *c}\n" % i for i in range(1000))),
        ("tag.yaml", b"services: {a: {command: [!!python/object/apply:os.system ['touch made']]}}"),
        ("scalar.yaml", b"hello\n"),
        ("list.yaml", b"- a\n- b\n"),
        ("nested.yaml", b"model: x\nspeculative-config: '" + b"[" * 100_000 + b"'\n"),
        ("digits.yaml", b"model: x\ntensor-parallel-size: " + b"9" * 5000 + b"\n"),
        ("json-digits.sh", b"vllm serve m -sc '{\"num_speculative_tokens\": " + b"9" * 5000 + b"}'"),
        ("nul.sh", b"vllm serve m \0"),
    ],
)  # fmt: skip
def test_hostile_files_are_one_clear_error(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_deployment(name)
    assert len(str(caught.value)) < 400 or "9" * 100 in str(caught.value)
    assert not (folder / "made").exists()
