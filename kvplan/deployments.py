"""Deployments: the command of a shell script, compose file, Kubernetes manifest or ``--config`` file that starts vLLM.

``FILE#name`` says which where several start vLLM. Nothing is executed and nothing but FILE, and the ``--config`` file
that it names, is read.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvplan.errors import InputError, unknown_name, unreadable
from kvplan.inputs import open_input
from kvplan.safe_yaml import Node, Place, decode, parse_documents
from kvplan.shell import MAX_SCRIPT, Locate, Word, locate_lines, read_script, split_words
from kvplan.vllm_command import VllmCommand, read_start, words_of_config
from kvplan.vllm_start import Start, find_in_container, find_start

#: Rendered charts of vLLM are a tenth of that; a larger text would only cost time before it is refused.
_MAX_BYTES = 1 << 20
#: Characters of commands and variables, those that aliases repeat included.
_MAX_COMMANDS = 512 << 10
_MAX_DEPTH = 60
_MAX_LISTED = 8

_YAML_LIKE = re.compile(r"""(?:---|%YAML|[\w."'/-]+\s*:(?:\s|\Z)|\{|-\s)""")
_COMPOSE_VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)(?:(?P<sign>:?[-?+])(?P<word>[^{}]*))?\})"
)
_KUBERNETES_VARIABLE = re.compile(r"\$(?:(?P<escaped>\$\([A-Za-z_][\w.-]*\))|\((?P<name>[A-Za-z_][\w.-]*)\))")
_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


class _Candidate(NamedTuple):
    """Something that starts vLLM, and the names that it goes by: the first that is its own is shown."""

    names: tuple[str, ...]
    start: Start


class _File:
    """A deployment: its name, text and lines, and the folder that paths in it start from."""

    def __init__(self, path: str, text: str) -> None:
        self.name = "standard input" if path == "-" else path
        self.text = text
        self.lines = text.split("\n")
        self.folder = Path(path).parent
        self._fields: dict[int, dict[str, Node]] = {}
        self._left = _MAX_COMMANDS

    def fields(self, node: Node, depth: int = 0) -> dict[str, Node]:
        """The fields of a mapping, those that ``<<`` merges in included.

        Each mapping is read once, however many aliases stand for it.
        """
        if depth > _MAX_DEPTH:
            raise InputError("an alias contains itself", where=str(node.place), hint="write the value out")
        known = self._fields.get(id(node.raw))
        if known is not None:
            return known
        fields = node.mapping("the value")
        merged = fields.pop("<<", None)
        if merged is not None:
            for one in merged.sequence("<<") if merged.is_sequence else [merged]:
                fields = {**self.fields(one, depth + 1), **fields}
        self._fields[id(node.raw)] = fields
        return fields

    def below(self, fields: Mapping[str, Node], key: str) -> Mapping[str, Node]:
        """The fields of a field; none where it is no mapping, or is not there."""
        node = fields.get(key)
        return self.fields(node) if node is not None and node.is_mapping else {}

    def word(self, node: Node, what: str) -> Word:
        """A plain value as a word that knows the places inside it; ``what`` names it in errors."""
        text = node.text
        if text is None:
            raise InputError(f"{what} is no plain text", where=str(node.place), hint="write it on one line")
        self._left -= len(text)
        if self._left < 0:
            raise InputError(
                f"the commands of the file are longer than {_MAX_COMMANDS >> 10} KiB",
                where=self.name,
                hint="use fewer aliases, or give the one manifest that starts vLLM",
            )
        known: list[Locate] = []

        def locate(offset: int) -> Place | None:
            if not known:  # most words are never asked
                known.append(node.locate(self.lines))
            return known[0](offset)

        return Word(text, node.place, locate=locate)


def read_deployment(source: str, *, ignored_flags: Sequence[str] = ()) -> VllmCommand:
    """Model and options of the command that ``FILE``, ``FILE#name`` or ``-`` (standard input) starts vLLM with.

    Raises `InputError` where the file cannot be read, starts no vLLM or several, or sets a flag that may change memory
    and that kvplan does not handle.
    """
    path, _, wanted = source.partition("#")
    file = _File(path, _read(path))
    candidates, others = _candidates(file)
    chosen = _choose(candidates, others, wanted, file.name)

    def read_config(word: Word) -> Sequence[Word]:
        return _config_words(word, file)

    return read_start(chosen.start, ignored_flags=ignored_flags, read_config=read_config)


def _read(path: str) -> str:
    try:
        with open_input(path) as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise unreadable(error, where=f"--from {path}") from error
    name = "standard input" if path == "-" else path
    if len(raw) > _MAX_BYTES:
        raise InputError(
            f"the file is larger than {_MAX_BYTES >> 20} MiB",
            where=name,
            hint="give the one manifest or script that starts vLLM",
        )
    if b"\0" in raw:
        raise InputError("the file is binary", where=name, hint="give a script, a compose file or a manifest")
    text = decode(raw, name)
    if not text.strip():
        raise InputError("the file is empty", where=name, hint="give a script, a compose file or a manifest")
    return text


def _candidates(file: _File) -> tuple[list[_Candidate], list[str]]:
    """What starts vLLM, and the names of what starts something else."""
    if not _is_yaml(file):
        return _in_script(file), []
    documents = parse_documents(file.text, file.name)
    if not documents:
        raise InputError("the file is empty", where=file.name, hint="give a compose file or a manifest")
    first = documents[0]
    fields = file.fields(first) if first.is_mapping else {}
    if "services" in fields and "kind" not in fields:
        return _Compose(file).candidates(fields["services"])
    if len(documents) == 1 and first.is_mapping and not {"kind", "apiVersion", "containers"} & fields.keys():
        return [_from_config(first, file)], []
    return _Kubernetes(file).candidates(documents)


def _is_yaml(file: _File) -> bool:
    """Whether a text is YAML: by its name, else by the first line that is no comment."""
    if file.text.startswith("#!"):
        return False
    suffix = Path(file.name).suffix.lower()
    if suffix in (".yaml", ".yml", ".json"):
        return True
    if suffix in (".sh", ".bash", ".zsh", ".service", ".slurm", ".sbatch"):
        return False
    lines = (line.strip() for line in file.lines)
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return _YAML_LIKE.match(first) is not None


def _choose(candidates: Sequence[_Candidate], others: Sequence[str], wanted: str, file: str) -> _Candidate:
    """The candidate that is named, or the only one."""
    taken = Counter(name for candidate in candidates for name in candidate.names)
    labels = [
        next((name for name in candidate.names if taken[name] == 1), str(number))
        for number, candidate in enumerate(candidates, 1)
    ]
    listed = _listed(f"{file}#{label}" for label in labels)
    if wanted:
        if wanted.isdigit() and 0 < int(wanted[:9]) <= len(candidates):
            return candidates[int(wanted) - 1]
        named = [c for c in candidates if wanted in c.names]
        if len(named) == 1:
            return named[0]
        if named:
            listed = _listed(
                f"{file}#{label}" for c, label in zip(candidates, labels, strict=True) if wanted in c.names
            )
            raise InputError(f'several are called "{wanted}"', where=file, hint=f"say which: {listed}")
        if any(wanted in (name, name.rpartition("/")[2]) for name in others):
            hint = f"these do: {listed}" if listed else "give the file that does"
            raise InputError(f'"{wanted}" does not start vLLM', where=file, hint=hint)
        raise unknown_name("container", wanted, [*labels, *others] or ["none"], where=file)
    if not candidates:
        seen = f"; it has {_listed(others)}" if others else ""
        raise InputError(
            f"nothing in the file starts vLLM{seen}",
            where=file,
            hint='pass the command: --vllm-command "vllm serve MODEL ..."',
        )
    if len(candidates) > 1:
        raise InputError(
            f"{len(candidates)} commands of the file start vLLM", where=file, hint=f"say which: {listed}"
        )
    return candidates[0]


def _listed(names: Iterable[str]) -> str:
    """The first names of many."""
    shown = list(islice(names, _MAX_LISTED + 1))
    return ", ".join(shown[:_MAX_LISTED]) + (", ..." if len(shown) > _MAX_LISTED else "")


def _config_words(word: Word, file: _File) -> list[Word]:
    """The flags of a ``--config`` file that the command names, looked for from the deployment's folder."""
    path = file.folder / word.text
    if not word.text or word.unknown or not path.is_file():
        raise InputError(
            f'--config names "{word.text}", which is not there',
            where=str(word.place or file.name),
            hint="put the file there, or pass it alone: --from config.yaml",
        )
    return words_of_config(path, str(path))


# Shell scripts


def _in_script(file: _File) -> list[_Candidate]:
    found: list[_Candidate] = []
    for command in read_script(file.text, locate_lines(file.text, file.name), file.name):
        start = find_start(command.words, command.environment)
        if start is not None:
            found.append(_Candidate((str(len(found) + 1),), start))
    return found


# vLLM's own configuration


def _from_config(node: Node, file: _File) -> _Candidate:
    words = words_of_config(Path("config.yaml"), file.name, root=node)
    return _Candidate(("1",), Start(tuple(words), {}, node.place))


# What compose files and manifests share


def _text(fields: Mapping[str, Node], key: str) -> str | None:
    """A field that is plain text."""
    return fields[key].text if key in fields else None


def _count(fields: Mapping[str, Node], key: str) -> int | None:
    """A field that is a whole number of up to four digits."""
    text = _text(fields, key) or ""
    return int(text) if re.fullmatch(r"[0-9]{1,4}", text) else None


def _fill_in(word: Word, pattern: re.Pattern[str], value: Callable[[re.Match[str]], str | None]) -> Word:
    """A word with its variables filled in; one whose value is not known stays and is noted."""
    unknown = word.unknown

    def replace(match: re.Match[str]) -> str:
        nonlocal unknown
        text = value(match)
        if text is None:
            unknown = unknown or match.group()
            return match.group()
        return text

    text = pattern.sub(replace, word.text)
    locate = word.locate
    if text != word.text and locate is not None:
        locate = _by_line(word.text, text, locate)
    return word._replace(text=text, unknown=unknown, locate=locate)


def _by_line(written: str, text: str, locate: Locate) -> Locate:
    """Places in a text whose variables are filled in: of the first word of the line that the offset stands in."""
    starts = [match.end() - 1 for match in re.finditer(r"^.*?\S", written, re.MULTILINE)]
    filled = [match.start() for match in re.finditer(r"^.*?\S", text, re.MULTILINE)]

    def line(offset: int) -> Place | None:
        number = bisect_right(filled, offset) - 1
        return locate(starts[number] if 0 <= number < len(starts) else 0)

    return line


# Compose


class _Compose:
    """The services of a compose file."""

    def __init__(self, file: _File) -> None:
        self._file = file

    def candidates(self, services: Node) -> tuple[list[_Candidate], list[str]]:
        """The services that start vLLM, and the names of the others."""
        found: list[_Candidate] = []
        others: list[str] = []
        for name, node in self._file.fields(services).items():
            start = self._start(node)
            if start is None:
                others.append(name)
            else:
                found.append(_Candidate((name,), start))
        return found, others

    def _start(self, node: Node) -> Start | None:
        fields = self._file.fields(node)
        image = self._text(fields.get("image"))
        entrypoint = self._words(fields["entrypoint"]) if "entrypoint" in fields else None
        command = self._words(fields["command"]) if "command" in fields else ()
        environment = self._environment(fields["environment"]) if "environment" in fields else {}
        start = find_in_container(
            image.text if image else None, entrypoint, command, environment, place=node.key_place
        )
        return start and start._replace(gpu_count=_compose_gpus(fields, self._file) or start.gpu_count)

    def _text(self, node: Node | None) -> Word | None:
        if node is None or node.text is None:
            return None
        return self._interpolate(self._file.word(node, "the value"))

    def _words(self, node: Node) -> tuple[Word, ...]:
        """A command that is a list, or one line that is split as a shell would."""
        if node.is_sequence:
            return tuple(self._interpolate(self._file.word(item, "the item")) for item in node.sequence("it"))
        word = self._file.word(node, "the command")
        if len(word.text) > MAX_SCRIPT:
            raise InputError(
                f"the command is longer than {MAX_SCRIPT >> 10} KiB", where=str(node.place), hint="shorten it"
            )
        locate = word.locate
        assert locate is not None, "a file's words have places"
        return tuple(self._interpolate(one) for one in split_words(word.text, locate, self._file.name))

    def _environment(self, node: Node) -> dict[str, Word]:
        if node.is_sequence:
            texts = [self._interpolate(self._file.word(item, "the item")) for item in node.sequence("it")]
            pairs = [(text, *text.text.partition("=")) for text in texts]
            return {
                name: word._replace(text=value)
                if given
                else word._replace(text=f"${name}", unknown=f"${name}")
                for word, name, given, value in pairs
            }
        return {
            name: self._interpolate(self._file.word(value, name))
            for name, value in self._file.fields(node).items()
        }

    def _interpolate(self, word: Word) -> Word:
        """``${NAME:-default}``; what the caller's environment or a .env file would give is not known."""

        def value(match: re.Match[str]) -> str | None:
            if match["escaped"]:
                return "$"
            sign = match["sign"] or ""
            return match["word"] if sign.endswith("-") else "" if sign.endswith("+") else None

        return _fill_in(word, _COMPOSE_VARIABLE, value)


def _compose_gpus(fields: Mapping[str, Node], file: _File) -> int | None:
    """GPUs of ``deploy.resources.reservations.devices``; None for all, or if it does not say."""
    for key in ("deploy", "resources", "reservations"):
        fields = file.below(fields, key)
    devices = fields.get("devices")
    if devices is None or not devices.is_sequence:
        return None
    total = 0
    for device in devices.sequence("devices"):
        device_fields = file.fields(device)
        ids = device_fields.get("device_ids")
        if ids is not None and ids.is_sequence:
            total += len(ids.sequence("device_ids"))
        else:
            total += _count(device_fields, "count") or 0
    return total or None


# Kubernetes


class _Kubernetes:
    """The containers of manifests, whatever kind of object they stand in."""

    def __init__(self, file: _File) -> None:
        self._file = file
        self._found: list[_Candidate] = []
        self._others: list[str] = []
        self._maps: dict[str, dict[str, Node]] = {}
        self._seen: set[int] = set()

    def candidates(self, documents: Sequence[Node]) -> tuple[list[_Candidate], list[str]]:
        """The containers that start vLLM, and the names of the others."""
        objects = [one for document in documents for one in self._objects(document, 0)]
        for fields in objects:
            if self._kind(fields) == "ConfigMap" and "data" in fields and fields["data"].is_mapping:
                self._maps[self._name(fields)] = self._file.fields(fields["data"])
        for fields in objects:
            for key in ("spec", "template", "containers"):
                if key in fields:
                    node = fields if key == "containers" else fields[key]
                    self._walk(node, self._name(fields), 1, 0)
        return self._found, self._others

    def _objects(self, node: Node, depth: int) -> Iterator[dict[str, Node]]:
        """The objects of a document; a List has several."""
        if not node.is_mapping or depth > _MAX_DEPTH:
            return
        fields = self._file.fields(node)
        if self._kind(fields).endswith("List") and "items" in fields and fields["items"].is_sequence:
            for item in fields["items"].sequence("items"):
                yield from self._objects(item, depth + 1)
        else:
            yield fields

    def _kind(self, fields: Mapping[str, Node]) -> str:
        return _text(fields, "kind") or ""

    def _name(self, fields: Mapping[str, Node]) -> str:
        name = _text(self._file.below(fields, "metadata"), "name")
        return name or self._kind(fields).lower() or "object"

    def _walk(self, node: Node | Mapping[str, Node], owner: str, pods: int, depth: int) -> None:
        """Every list of containers below a value, once however many aliases lead there; ``pods`` share one model."""
        if depth > _MAX_DEPTH:
            where = str(node.place) if isinstance(node, Node) else self._file.name
            raise InputError("the file is nested too deeply", where=where, hint="write it flatter")
        if isinstance(node, Node):
            if id(node.raw) in self._seen:
                return
            self._seen.add(id(node.raw))
            if node.is_sequence:
                for item in node.sequence("it"):
                    if item.is_mapping or item.is_sequence:
                        self._walk(item, owner, pods, depth + 1)
            if not node.is_mapping:
                return
            fields: Mapping[str, Node] = self._file.fields(node)
        else:
            fields = node
        size = _count(fields, "size") if "leaderTemplate" in fields else None
        if size is not None:
            pods *= size
        for key, value in fields.items():
            if key == "containers" and value.is_sequence:
                for container in value.sequence("containers"):
                    if container.is_mapping:
                        self._container(container, owner, pods)
            elif key == "model" and value.is_mapping and "modelFormat" in self._file.fields(value):
                self._kserve_model(value, owner)
            elif value.is_mapping or value.is_sequence:
                self._walk(value, owner, pods, depth + 1)

    def _container(self, node: Node, owner: str, pods: int) -> None:
        fields = self._file.fields(node)
        name = _text(fields, "name") or f"container-{len(self._found) + 1}"
        environment = self._environment(fields)
        start = find_in_container(
            _text(fields, "image"),
            self._words(fields["command"], environment) if "command" in fields else None,
            self._words(fields["args"], environment) if "args" in fields else (),
            environment,
            place=node.place,
        )
        if start is None:
            self._others.append(f"{owner}/{name}")
            return
        gpus = _kubernetes_gpus(fields, self._file)
        start = start._replace(gpu_count=gpus * pods if gpus is not None else start.gpu_count)
        self._found.append(_Candidate((name, owner, f"{owner}/{name}"), start))

    def _kserve_model(self, node: Node, owner: str) -> None:
        """A model that KServe's server for Hugging Face models runs with vLLM: its arguments are vLLM's."""
        fields = self._file.fields(node)
        given = _text(self._file.below(fields, "modelFormat"), "name") or ""
        if given.lower() not in ("huggingface", "vllm"):
            self._others.append(owner)
            return
        environment = self._environment(fields)
        words = list(self._words(fields["args"], environment)) if "args" in fields else []
        storage = _text(fields, "storageUri")
        names_model = any(re.match(r"--model[-_]id|--model(?:=|\Z)", word.text) for word in words)
        if storage is not None and not names_model:
            model = (
                storage.removeprefix("hf://").partition(":")[0] if storage.startswith("hf://") else storage
            )
            words.insert(0, Word(model, fields["storageUri"].place))
        start = Start(tuple(words), environment, node.key_place, _kubernetes_gpus(fields, self._file))
        self._found.append(_Candidate((owner,), start))

    def _words(self, node: Node, environment: Mapping[str, Word]) -> tuple[Word, ...]:
        """The items of a command, with ``$(NAME)`` filled in."""

        def value(match: re.Match[str]) -> str | None:
            if match["escaped"]:
                return match["escaped"]
            word = environment.get(match["name"])
            if word is None:
                return match.group()  # a variable that is not set stays as it is written
            return None if word.unknown else word.text

        return tuple(
            _fill_in(self._file.word(item, "the item"), _KUBERNETES_VARIABLE, value)
            for item in node.sequence("the command")
        )

    def _environment(self, fields: Mapping[str, Node]) -> dict[str, Word]:
        environment: dict[str, Word] = {}
        for source in fields["envFrom"].sequence("envFrom") if "envFrom" in fields else ():
            reference = self._file.fields(source).get("configMapRef")
            name = _text(self._file.fields(reference), "name") if reference is not None else None
            for key, value in self._maps.get(name or "", {}).items():
                environment[key] = self._file.word(value, key)
        for item in fields["env"].sequence("env") if "env" in fields else ():
            one = self._file.fields(item)
            key = _text(one, "name") or ""
            given = one.get("value") or self._from_map(one)
            environment[key] = (
                self._file.word(given, key) if given else Word(f"$({key})", item.place, f"${key}")
            )
        return environment

    def _from_map(self, variable: Mapping[str, Node]) -> Node | None:
        """The value of ``valueFrom.configMapKeyRef`` where the file has the map."""
        reference = self._file.below(self._file.below(variable, "valueFrom"), "configMapKeyRef")
        return self._maps.get(_text(reference, "name") or "", {}).get(_text(reference, "key") or "")


def _kubernetes_gpus(fields: Mapping[str, Node], file: _File) -> int | None:
    """GPUs of ``resources.limits``, else of ``requests``."""
    resources = file.below(fields, "resources")
    counts = (
        _count(file.below(resources, kind), name)
        for kind in ("limits", "requests")
        for name in _GPU_RESOURCES
    )
    return next((count for count in counts if count is not None), None)
