"""Models by their Hugging Face name: what the local cache holds, and what is fetched from a server."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from toy_models import LLAMA_CONFIG

import kvplan
from kvplan.config import load_model
from kvplan.errors import InputError
from kvplan.hub import Repo, cached_folder, parse_repo

ROOT = Path(kvplan.__file__).resolve().parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = LLAMA_CONFIG | {"torch_dtype": "bfloat16"}
HAS_LIBRARY = importlib.util.find_spec("huggingface_hub") is not None
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="huggingface_hub is not installed: kvplan[hub]")


def safetensors(**elements: int) -> bytes:
    """A weight file with tensors of so many BF16 elements; its data is zeros."""
    header: dict[str, object] = {}
    end = 0
    for name, number in elements.items():
        header[name] = {"dtype": "BF16", "shape": [number], "data_offsets": [end, end + 2 * number]}
        end += 2 * number
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {FIRST: safetensors(a=3, b=4), SECOND: safetensors(c=5)}
INDEX = json.dumps({"weight_map": {"a": FIRST, "b": FIRST, "c": SECOND}}).encode()
MODEL = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors.index.json": INDEX, **SHARDS}


@pytest.mark.parametrize(
    ("text", "repo"),
    [
        ("meta-llama/Llama-2-13b-hf", Repo("meta-llama/Llama-2-13b-hf", "main")),
        ("org/name@v1.0", Repo("org/name", "v1.0")),
        ("org/name@refs/pr/3", Repo("org/name", "refs/pr/3")),
        ("org", None),
        ("org/", None),
        ("/name", None),
        ("org/a/b", None),
        ("org/..", None),
        ("../name", None),
        ("org/a--b", None),
        ("org/name@", None),
        ("org/name@../../x", None),
        ("org/na me", None),
        ("örg/name", None),
        ("org/name\n", None),
    ],
)
def test_a_name_on_the_hub_has_an_organization(text: str, repo: Repo | None) -> None:
    assert parse_repo(text) == repo


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hub"


def fill(cache: Path, files: dict[str, bytes], *, repo: str = "org/name", ref: str = "main") -> Path:
    """A model in the cache as huggingface_hub lays it out: files are links to blobs."""
    home = cache / f"models--{repo.replace('/', '--')}"
    for folder in ("refs", "blobs", f"snapshots/{COMMIT}"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    (home / "refs" / ref).write_text(COMMIT)
    for number, (name, content) in enumerate(files.items()):
        (home / "blobs" / str(number)).write_bytes(content)
        (home / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/{number}")
    return home / "snapshots" / COMMIT


def test_a_cached_model_has_the_weights_of_its_files(cache: Path) -> None:
    folder = fill(cache, MODEL)
    model = load_model("org/name")
    assert (model.name, model.hf_id, model.num_layers) == ("name", "org/name", 2)
    assert (model.weights.parameters, model.weights.stored_bytes) == (3 + 4 + 5, 24)
    assert model.weights.source == "safetensors"
    assert model.source == str(folder / "config.json")
    assert load_model(f"org/name@{COMMIT}") == model


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HF_HUB_CACHE": "one"}, "one"),
        ({"HUGGINGFACE_HUB_CACHE": "two"}, "two"),
        ({"HF_HOME": "three"}, "three/hub"),
        ({"XDG_CACHE_HOME": "four"}, "four/huggingface/hub"),
        ({"HOME": "five"}, "five/.cache/huggingface/hub"),
        ({"HF_HUB_CACHE": "one", "HF_HOME": "three"}, "one"),
        ({"HF_HUB_CACHE": "$WHERE/six"}, "seven/six"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_the_cache_is_where_huggingface_hub_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("WHERE", str(tmp_path / "seven"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value if value.startswith("$") else str(tmp_path / value))
    folder = fill(tmp_path / place, MODEL)
    assert cached_folder(Repo("org/name", "main")) == folder


@pytest.mark.parametrize("files", [["config.json"], ["config.json", "model.safetensors.index.json"]])
def test_a_model_that_was_only_looked_at_is_sized_from_its_config(cache: Path, files: list[str]) -> None:
    fill(cache, {name: MODEL[name] for name in files})
    assert load_model("org/name").weights.source == "config"


def test_half_of_the_shards_without_an_index_are_no_weights(cache: Path) -> None:
    fill(cache, {"config.json": MODEL["config.json"], SECOND: SHARDS[SECOND]})
    assert load_model("org/name").weights.source == "config"


def test_a_revision_is_found_by_its_name(cache: Path) -> None:
    fill(cache, MODEL, ref="v2")
    assert load_model("org/name@v2").num_layers == 2
    assert cached_folder(Repo("org/name", "main")) is None


@pytest.mark.parametrize("entry", ["config.json", "model.safetensors", "README.md"])
def test_a_link_that_leaves_the_cache_is_refused(cache: Path, tmp_path: Path, entry: str) -> None:
    folder = fill(cache, {name: text for name, text in MODEL.items() if name != entry})
    outside = tmp_path / "outside"
    outside.write_bytes(MODEL["config.json"])
    (folder / entry).symlink_to(outside)
    with pytest.raises(InputError, match=rf"{re.escape(entry)} leads out of the Hugging Face cache"):
        load_model("org/name")


def test_a_snapshot_that_leaves_the_cache_is_refused(cache: Path, tmp_path: Path) -> None:
    folder = fill(cache, {})
    folder.rmdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_bytes(MODEL["config.json"])
    folder.symlink_to(tmp_path / "outside")
    with pytest.raises(InputError, match="leads out of the Hugging Face cache"):
        load_model("org/name")


@pytest.mark.parametrize("reference", ["../../../etc", "", "\xff", "x" * 100])
def test_a_reference_that_is_no_commit_leads_nowhere(cache: Path, reference: str) -> None:
    folder = fill(cache, MODEL)
    (folder.parents[1] / "refs" / "main").write_bytes(reference.encode("latin-1"))
    assert cached_folder(Repo("org/name", "main")) is None


def test_the_catalogue_comes_before_the_cache(cache: Path) -> None:
    fill(cache, MODEL, repo="meta-llama/Llama-2-13b-hf")
    assert load_model("meta-llama/Llama-2-13b-hf").num_layers == 40


def test_a_folder_comes_before_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(cache, MODEL)
    monkeypatch.chdir(cache.parent)
    Path("org/name").mkdir(parents=True)
    Path("org/name/config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 7}))
    assert load_model("org/name").num_layers == 7


@pytest.mark.skipif(HAS_LIBRARY, reason="huggingface_hub is installed")
@pytest.mark.usefixtures("cache")
def test_without_the_extra_the_hint_names_it() -> None:
    with pytest.raises(InputError) as caught:
        load_model("meta-llama/Llama-2-13b-h")
    assert caught.value.what == 'unknown model "meta-llama/Llama-2-13b-h"'
    assert "did you mean meta-llama/Llama-2-13b-hf" in (caught.value.hint or "")
    assert "pip install 'kvplan[hub]'" in (caught.value.hint or "")


class Server(ThreadingHTTPServer):
    """A hub with some models; it notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: dict[str, dict[str, bytes]] = {"org/name": MODEL}
        self.asked: list[tuple[str, str, str]] = []
        self.sent_bytes = 0


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does: files by range, errors by a code in a header."""

    server: Server

    def do_GET(self) -> None:
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(.+)/([^/]+)", self.path)
        assert found, self.path
        repo, revision, name = found.groups()
        wanted = self.headers["Range"]
        self.server.asked.append((f"{revision}/{name}", wanted, self.headers.get("Authorization", "")))
        if repo == "org/gated":
            self.refuse(403, "GatedRepo")
        elif repo == "org/broken":
            self.refuse(500, "")
        elif repo not in self.server.models:
            self.refuse(401, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        elif name not in self.server.models[repo]:
            self.refuse(404, "EntryNotFound")
        else:
            content = self.server.models[repo][name]
            first, last = (int(one) for one in wanted.removeprefix("bytes=").split("-"))
            part = content[first : last + 1]
            self.server.sent_bytes += len(part)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            self.wfile.write(part)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def size(server: Server, tmp_path: Path, model: str, **variables: str) -> dict[str, object]:
    """What a process prints that has the server for its hub and an empty cache."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **variables,
    }
    child = subprocess.run(
        [sys.executable, "-m", "kvplan", "size", model, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode in (0, 2), child.stderr
    assert "Traceback" not in child.stderr
    document = json.loads(child.stdout)
    assert isinstance(document, dict)
    return document


@needs_library
def test_only_config_and_headers_are_fetched(server: Server, tmp_path: Path) -> None:
    document = size(server, tmp_path, "org/name", HF_TOKEN="hf_secret")
    weights = document["weights"]
    assert isinstance(weights, dict)
    assert (weights["parameters"], weights["source"]) == (12, "safetensors")
    names = [name for name, _, _ in server.asked]
    # All but the first are asked for at the commit that the first was from.
    assert names[:2] == ["main/config.json", f"{COMMIT}/model.safetensors.index.json"]
    assert sorted(names[2:]) == [f"{COMMIT}/{name}" for name in SHARDS]
    assert {token for _, _, token in server.asked} == {"Bearer hf_secret"}
    assert not list(tmp_path.rglob("*.json")), "nothing is written"


@needs_library
def test_a_long_header_is_fetched_in_two_parts_and_no_data_is(server: Server, tmp_path: Path) -> None:
    long = safetensors(**{f"model.layers.{i}.weight": 1000 for i in range(3000)})
    server.models["org/long"] = {"config.json": MODEL["config.json"], "model.safetensors": long}
    document = size(server, tmp_path, "org/long")
    weights = document["weights"]
    assert isinstance(weights, dict)
    assert weights["parameters"] == 3_000_000
    (header_bytes,) = struct.unpack("<Q", long[:8])
    assert header_bytes > 200_000
    assert server.sent_bytes == len(MODEL["config.json"]) + 8 + header_bytes


@needs_library
def test_a_model_without_weight_files_is_sized_from_its_config(server: Server, tmp_path: Path) -> None:
    server.models["org/bare"] = {"config.json": MODEL["config.json"]}
    weights = size(server, tmp_path, "org/bare")["weights"]
    assert isinstance(weights, dict)
    assert weights["source"] == "config"


@needs_library
@pytest.mark.parametrize(
    ("model", "message", "hint"),
    [
        ("org/gated", '"org/gated" is gated', "ask for access"),
        ("org/none", 'no model "org/none" is found on http://127.0.0.1', "needs HF_TOKEN"),
        ("org/name@v9", '"org/name" has no revision "v9"', "after @"),
        ("org/empty", '"org/empty" has no config.json', "form of transformers"),
        ("org/broken", '"org/broken" could not be fetched from http://127.0.0.1', "HF_ENDPOINT"),
        ("org/partial", '"model-00002-of-00002.safetensors" is missing', "another revision"),
        ("org/outside", 'the index points to "../x.safetensors", outside its folder', "beside it"),
        ("org/cut", "model.safetensors is no whole safetensors file: its header claims", "download"),
        ("org/prose", "the file is no JSON", "mend"),
    ],
)
def test_what_cannot_be_fetched_is_told(
    server: Server, tmp_path: Path, model: str, message: str, hint: str
) -> None:
    config = {"config.json": MODEL["config.json"]}
    server.models |= {
        "org/empty": {"README.md": b"x"},
        "org/partial": {name: text for name, text in MODEL.items() if not name.startswith("model-00002")},
        "org/outside": config
        | {"model.safetensors.index.json": b'{"weight_map": {"x": "../x.safetensors"}}'},
        "org/cut": config | {"model.safetensors": struct.pack("<Q", 2**60) + bytes(100)},
        "org/prose": {"config.json": b"Call me Ishmael."},
    }
    error = size(server, tmp_path, model)["error"]
    assert isinstance(error, dict)
    assert message in error["message"]
    assert hint in error["hint"]


@needs_library
def test_offline_means_that_nothing_is_asked_for(server: Server, tmp_path: Path) -> None:
    error = size(server, tmp_path, "org/name", HF_HUB_OFFLINE="1")["error"]
    assert isinstance(error, dict)
    assert error["message"] == '"org/name" is not in the Hugging Face cache, and HF_HUB_OFFLINE is set'
    assert server.asked == []


@needs_library
def test_a_hub_that_does_not_answer_is_told(server: Server, tmp_path: Path) -> None:
    # A port that was free a moment ago.
    error = size(server, tmp_path, "org/name", HF_ENDPOINT="http://127.0.0.1:9")["error"]
    assert isinstance(error, dict)
    assert '"org/name" could not be fetched from http://127.0.0.1:9' in error["message"]
