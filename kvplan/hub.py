"""Models by their Hugging Face name: in the local cache, or fetched with the extra ``kvplan[hub]``.

Layout of the cache (huggingface_hub 1.0, documentation "Manage cache"): ``models--ORG--NAME/refs/REVISION`` holds a
commit, ``snapshots/COMMIT`` the files of it, as links into ``blobs``. Only config.json and the headers of
``*.safetensors`` are read or fetched, and nothing is written. ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``
mean what they mean to huggingface_hub, which does the fetching.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvplan.errors import InputError
from kvplan.safetensors import (
    INDEX_NAME,
    MAX_INDEX_BYTES,
    SINGLE_NAME,
    StoredWeights,
    Tensor,
    files_of_index,
    header_tensors,
    total_weights,
)

#: ``org/name`` and perhaps ``@revision`` (huggingface_hub, utils/_validators.py REPO_ID_REGEX).
_REPO = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,200}))?\Z", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{7,64}\Z")
#: As much as huggingface_hub asks for at first: nearly all headers are shorter.
_FIRST_BYTES = 100_000
#: Requests at a time; a model may have two hundred files.
_CONNECTIONS = 16


class Repo(NamedTuple):
    """A model on the Hugging Face hub."""

    id: str
    revision: str

    @property
    def name(self) -> str:
        """The name without its organization."""
        return self.id.partition("/")[2]


class FetchedModel(NamedTuple):
    """What was fetched of a model: the text of its config.json, and its weights' totals once the config is read."""

    config: bytes
    source: str
    read_weights: Callable[[range], StoredWeights | None]


def parse_repo(text: str) -> Repo | None:
    """The model that ``org/name`` or ``org/name@revision`` names; None where the text is no such name."""
    match = _REPO.match(text)
    if match is None or ".." in text or "--" in match[1]:
        return None
    return Repo(match[1], match[2] or "main")


def cached_folder(repo: Repo) -> Path | None:
    """The folder with a model's files in the local cache; None where its config.json is not there.

    Raises `InputError` where a file of it lies outside the cache: a link that was made to lead elsewhere.
    """
    cache = _cache()
    home = cache / f"models--{repo.id.replace('/', '--')}"
    commit = repo.revision
    try:
        if not (home / "snapshots" / commit).is_dir():
            commit = (home / "refs" / repo.revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    folder = home / "snapshots" / commit
    if "/" in commit or not _COMMIT.match(commit) or not (folder / "config.json").is_file():
        return None
    root = cache.resolve()
    for file in (folder, *folder.iterdir()):
        if not file.resolve().is_relative_to(root):
            raise InputError(
                f"{file.name[:60]} leads out of the Hugging Face cache",
                where=str(folder),
                hint="download the model again, or give the path of a folder that holds it",
            )
    return folder


def _cache() -> Path:
    """Where huggingface_hub keeps models (huggingface_hub/constants.py)."""
    environment = os.environ.get
    home = environment("HF_HOME") or os.path.join(environment("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = environment("HF_HUB_CACHE") or environment("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))


def can_fetch() -> bool:
    """Whether the extra ``kvplan[hub]`` is installed."""
    from importlib.util import find_spec

    return find_spec("huggingface_hub") is not None


def fetch_model(repo: Repo, *, max_config_bytes: int, where: str) -> FetchedModel:
    """A model's config.json from the hub, and a way to its weights' headers. Raises `InputError`."""
    client = _Client(repo, where)
    config, revision = client.config(max_config_bytes)
    client.revision = revision
    source = f"{client.endpoint}/{repo.id}/tree/{revision}"
    return FetchedModel(config, source, client.read_weights)


class _Client:
    """Reads parts of one model's files, through the session of huggingface_hub."""

    def __init__(self, repo: Repo, where: str) -> None:
        from huggingface_hub import constants

        self.endpoint = constants.ENDPOINT
        self.revision = repo.revision
        self._repo = repo
        self._where = where

    def config(self, max_bytes: int) -> tuple[bytes, str]:
        """The text of config.json, and the commit that it is from, so that all files are of one."""
        part = self._fetch("config.json", 0, max_bytes)
        if part is None:
            raise InputError(
                f'"{self._repo.id}" has no config.json',
                where=self._where,
                hint="give a repository of a model in the form of transformers, or the path of a .gguf file",
            )
        if part.file_bytes > max_bytes:
            raise InputError("config.json is too large for one", where=self._where, hint="check the name")
        return part.content, part.commit if _COMMIT.match(part.commit) else self.revision

    def read_weights(self, draft_layers: range) -> StoredWeights | None:
        """Totals over the weight files, by their headers; None where the model has no such files."""
        from concurrent.futures import ThreadPoolExecutor

        index = self._fetch(INDEX_NAME, 0, MAX_INDEX_BYTES)
        names = [SINGLE_NAME] if index is None else files_of_index(index.content, self._path(INDEX_NAME))
        with ThreadPoolExecutor(_CONNECTIONS) as threads:
            files = dict(zip(names, threads.map(self._tensors, names), strict=True))
        found = [(name, tensors) for name, tensors in files.items() if tensors is not None]
        if index is not None and len(found) < len(files):
            missing = next(name for name, tensors in files.items() if tensors is None)
            raise InputError(
                f'"{missing[:60]}" is missing, one of the files of "{self._repo.id}"',
                where=self._where,
                hint="give another revision after @, or the path of a folder with the model",
            )
        return total_weights(found, where=self._where, draft_layers=draft_layers)

    def _tensors(self, name: str) -> list[Tensor] | None:
        """The tensors of a weight file, by its header; None where there is no such file."""
        first = self._fetch(name, 0, _FIRST_BYTES)
        if first is None:
            return None

        def read(start: int, count: int) -> bytes:
            found = first.content[start : start + count]
            if len(found) < count and (more := self._fetch(name, start + len(found), count - len(found))):
                found += more.content
            return found

        return header_tensors(self._path(name), first.file_bytes, read)

    def _path(self, name: str) -> Path:
        return Path(self._repo.id, name)

    def _fetch(self, name: str, start: int, count: int) -> _Part | None:
        """Some bytes of a file; None where the model has no such file."""
        from huggingface_hub import constants, errors, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self._repo.id, name, revision=self.revision, endpoint=self.endpoint)
        headers = build_hf_headers(library_name="kvplan")
        headers |= {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
        try:
            response = get_session().get(url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
            hf_raise_for_status(response)
        except errors.EntryNotFoundError:
            return None
        except (errors.HFValidationError, OSError, *errors.HfHubHTTPError.__bases__) as error:
            # The base of the library's error is that of its HTTP client's: requests before 1.0, httpx since.
            raise self._explained(error) from None
        total = response.headers.get("content-range", "").rpartition("/")[2]
        content = bytes(response.content)
        return _Part(
            content,
            int(total) if total.isdecimal() else len(content),
            response.headers.get("x-repo-commit", ""),
        )

    def _explained(self, error: BaseException) -> InputError:
        """What went wrong, and what would mend it."""
        from huggingface_hub import errors

        name = self._repo.id
        if isinstance(error, errors.GatedRepoError):
            what, hint = f'"{name}" is gated', "ask for access on its page, then set HF_TOKEN"
        elif isinstance(error, errors.RevisionNotFoundError):
            what, hint = (
                f'"{name}" has no revision "{self.revision}"',
                "give a branch, a tag or a commit after @",
            )
        elif isinstance(error, errors.RepositoryNotFoundError):
            what = f'no model "{name}" is found on {self.endpoint}'
            hint = "check the name; a private model needs HF_TOKEN"
        elif isinstance(error, errors.OfflineModeIsEnabled):
            what = f'"{name}" is not in the Hugging Face cache, and HF_HUB_OFFLINE is set'
            hint = "unset HF_HUB_OFFLINE, or give the path of a folder with the model"
        else:
            reason = str(error).partition("\n")[0][:120] or type(error).__name__
            what = f'"{name}" could not be fetched from {self.endpoint}: {reason}'
            hint = "check the network and HF_ENDPOINT, or give the path of a folder with the model"
        return InputError(what, where=self._where, hint=hint)


class _Part(NamedTuple):
    """Some bytes of a file on the hub, the size of the whole file, and the commit that it is from."""

    content: bytes
    file_bytes: int
    commit: str
