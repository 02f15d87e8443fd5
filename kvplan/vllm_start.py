"""Finding the command that starts vLLM among the words of a shell or of a container. Nothing of it is executed.

It may stand behind ``env``, ``sudo``, ``docker run``, ``bash -c`` and whatever else runs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvplan.safe_yaml import Place
from kvplan.shell import Word, read_script


class Start(NamedTuple):
    """A command that starts vLLM: the words behind it, its environment and place.

    ``version`` is that of vLLM as the tag of the container's image has it, None if that does not tell.
    """

    words: tuple[Word, ...]
    environment: Mapping[str, Word]
    place: Place | None
    gpu_count: int | None = None
    version: str | None = None


#: Programs that name other commands without running them.
_NAMING_ONLY = "echo printf pkill pgrep grep kill killall which type man cat ps tee alias sed"
_NOT_RUN = frozenset(_NAMING_ONLY.split())
_SHELLS = frozenset({"sh", "bash", "zsh", "dash", "ash", "ksh"})
_CONTAINER_TOOLS = frozenset({"docker", "podman", "nerdctl"})
_SERVER_MODULES = frozenset(
    {
        "vllm.entrypoints.openai.api_server",
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.entrypoints.api_server",
    }
)
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)\Z", re.DOTALL)
#: Options of ``docker run`` that take no value.
_DOCKER_SWITCHES_TEXT = (
    "detach interactive tty rm privileged init read-only no-healthcheck oom-kill-disable publish-all sig-proxy "
    "disable-content-trust quiet help replace tls-verify rmi"
)
_DOCKER_SWITCHES = frozenset(_DOCKER_SWITCHES_TEXT.split())
_MAX_NESTING = 8


def find_start(words: Sequence[Word], environment: Mapping[str, Word], *, nesting: int = 0) -> Start | None:
    """The start of vLLM among the words of one command; None if it starts something else.

    Whatever stands before it (``exec``, ``sudo``, ``numactl --membind 0``, ``uv run``) runs it; assignments there are
    its environment. Raises `InputError` for a script in a word that cannot be read.
    """
    environment = dict(environment)
    if not words or _program(words[0]) in _NOT_RUN or nesting > _MAX_NESTING:
        return None
    for at, word in enumerate(words):
        rest = words[at + 1 :]
        follows = rest[0].text if rest else ""
        name = _program(word)
        if match := _ASSIGNMENT.match(word.text):
            environment[match.group(1)] = word._replace(text=match.group(2))
        elif name in _SHELLS:
            script = _script_of(rest)
            if script is not None:
                return _in_script(script, environment, nesting)
        elif name in _CONTAINER_TOOLS and follows in ("run", "create"):
            return _in_docker(rest[1:], nesting)
        elif name == "vllm" and follows == "serve":
            return Start(tuple(rest[1:]), environment, word.place)
        elif word.text == "-m" and follows in _SERVER_MODULES:
            return Start(tuple(rest[1:]), environment, words[max(0, at - 1)].place)
        elif word.text.endswith("vllm/entrypoints/openai/api_server.py"):
            return Start(tuple(rest), environment, word.place)
    return None


def find_in_container(
    image: str | None,
    entrypoint: Sequence[Word] | None,
    arguments: Sequence[Word],
    environment: Mapping[str, Word],
    *,
    place: Place | None = None,
    nesting: int = 0,
) -> Start | None:
    """The start of vLLM in a container; ``entrypoint`` is None where the image's own runs.

    That of vLLM's images is ``vllm serve`` (once ``api_server``), so that their arguments are flags.
    """
    start = find_start([*(entrypoint or ()), *arguments], environment, nesting=nesting)
    if start is None and entrypoint is None and is_vllm_image(image):
        first = arguments[0].text if arguments else ""
        if first.startswith("-") or re.fullmatch(r"[\w.-]+/[\w.-]+", first):
            start = Start(tuple(arguments), dict(environment), arguments[0].place or place)
    return start and start._replace(version=start.version or _version_of(image))


def is_vllm_image(image: str | None) -> bool:
    """Whether an image is one of vLLM by its name: ``vllm/vllm-openai:v0.33.0``, ``registry/team/vllm``."""
    if image is None:
        return False
    return "vllm" in image.partition("@")[0].rpartition("/")[2].partition(":")[0].lower()


def _version_of(image: str | None) -> str | None:
    """The version in the tag of one of vLLM's images: ``0.11.0`` of ``vllm/vllm-openai:v0.11.0-x86_64``."""
    if image is None or not is_vllm_image(image):
        return None
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    match = re.match(r"v?([0-9]{1,3}\.[0-9]{1,3}(?:\.[0-9]{1,3})?)(?![0-9.])", tag)
    return match.group(1) if match else None


def _program(word: Word) -> str:
    return word.text.rpartition("/")[2]


def _script_of(words: Sequence[Word]) -> Word | None:
    """The script behind ``-c``, ``-lc`` and the like."""
    for at, word in enumerate(words):
        if not word.text.startswith(("-", "+")) or word.text.startswith("--"):
            if word.text in ("pipefail", "errexit") or word.text.startswith("--"):
                continue
            return None
        if "c" in word.text:
            return words[at + 1] if at + 1 < len(words) else None
    return None


def _in_script(script: Word, environment: Mapping[str, Word], nesting: int) -> Start | None:
    """The last start of vLLM in a script that is a word."""
    found = None
    locate = script.locate or (lambda _: script.place)
    for command in read_script(script.text, locate, str(script.place or "--vllm-command"), environment):
        found = find_start(command.words, command.environment, nesting=nesting + 1) or found
    return found


def _in_docker(words: Sequence[Word], nesting: int) -> Start | None:
    """The start of vLLM in ``docker run OPTIONS IMAGE ARGUMENTS``; ``words`` stand behind ``run``."""
    environment: dict[str, Word] = {}
    entrypoint: list[Word] | None = None
    gpu_count: int | None = None
    at = 0
    while at < len(words) and words[at].text.startswith("-"):
        name, equals, inline = words[at].text.partition("=")
        value = words[at]._replace(text=inline)
        at += 1
        is_short = re.fullmatch(r"-[ditPq]+", name) is not None
        if name.lstrip("-") in _DOCKER_SWITCHES or is_short:
            continue
        if not name.startswith("--") and len(name) > 2:  # -p8000:8000, -eNAME=value
            value = words[at - 1]._replace(text=words[at - 1].text[2:])
            name = name[:2]
        elif not equals:
            if at >= len(words):
                break
            value = words[at]
            at += 1
        if name in ("-e", "--env"):
            variable, given, text = value.text.partition("=")
            unknown = value.unknown if given else f"${variable}"
            environment[variable] = value._replace(text=text if given else f"${variable}", unknown=unknown)
        elif name == "--entrypoint":
            entrypoint = [value] if value.text else []
        elif name == "--gpus":
            gpu_count = _gpus_of_docker(value.text)
    if at >= len(words):
        return None
    start = find_in_container(
        words[at].text, entrypoint, words[at + 1 :], environment, place=words[at].place, nesting=nesting + 1
    )
    return start and start._replace(gpu_count=gpu_count if gpu_count is not None else start.gpu_count)


def _gpus_of_docker(text: str) -> int | None:
    """How many GPUs ``--gpus`` gives: ``2``, ``count=2``, ``device=0,1``; None for ``all``."""
    text = text.strip("\"'")
    if match := re.fullmatch(r"(?:count=)?([0-9]{1,4})", text):
        return int(match.group(1))
    devices = re.search(r"device=([^\"']+)", text)
    return len(devices.group(1).split(",")) if devices else None
