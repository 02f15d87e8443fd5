"""The command that starts vLLM, as options of kvplan. Nothing of it is executed.

`read_command` takes a command line, `read_start` a command that was found in a deployment.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from kvplan.core.vllm_rules import nearest_rules
from kvplan.errors import InputError
from kvplan.options import ServingOptions, SimulateOptions, flag, parse_engine
from kvplan.safe_yaml import Node, Place, read_yaml
from kvplan.shell import Word, read_script
from kvplan.units import parse_count
from kvplan.vllm_flags import (
    COMPILATION_HARMLESS,
    COMPILATION_NEUTRAL,
    FLAGS,
    MEMORY_VARIABLES,
    SPECULATIVE_HARMLESS,
    SPECULATIVE_OPTIONS,
    Flag,
    canonical,
    look_up,
)
from kvplan.vllm_start import Start, find_start


class VllmCommand(NamedTuple):
    """Model and options of a command, and what was left out of it on purpose.

    ``where`` names the place of each option (``file:line:column``), ``unread`` has the error of each value that cannot
    be told from the text alone, ``scheduling`` names flags that change a run but no size, and ``gpu_count`` is how many
    GPUs the deployment gives the command, ``ranks_here`` how many it drives where others run elsewhere, ``version``
    that of vLLM in its image: None if it does not say.
    """

    model: str
    values: Mapping[str, object]
    ignored: tuple[str, ...]
    where: Mapping[str, str] = {}
    place: Place | None = None
    unread: Mapping[str, InputError] = {}
    scheduling: tuple[str, ...] = ()
    gpu_count: int | None = None
    ranks_here: int | None = None
    version: str | None = None

    @property
    def source(self) -> str:
        """What the options came from, for a reader."""
        return self.place.file if self.place is not None else "--vllm-command"

    def fill(self, options: ServingOptions, origins: dict[str, str] | None = None) -> dict[str, str]:
        """Set every option that is not given yet; returns where each came from.

        A flag that the job does not have (scheduling, in ``size``) changes nothing there and is passed over; one that
        a simulation has no option for raises `InputError`, as does a value that the text alone does not tell.
        """
        origins = {} if origins is None else origins
        if isinstance(options, SimulateOptions) and self.scheduling:
            raise InputError(
                f"{self.scheduling[0]} is not handled and changes a simulation",
                where=str(self.place or "--vllm-command"),
                hint=f"pass --ignore-flag {canonical(self.scheduling[0]).lstrip('-')} to leave it out",
            )
        known = {item.name for item in fields(options)}
        for name, value in self.values.items():
            if name not in known:
                continue
            origin = self.where.get(name, "vllm command")
            if name == "set":  # the user's own changes come last
                options.set = (*value, *options.set) if isinstance(value, tuple) else options.set
                continue
            if getattr(options, name) is not None:
                continue
            if name in self.unread:
                raise self.unread[name]
            try:
                options.set_option(name, value)
            except InputError as error:
                raise InputError(error.what, where=f"{origin}, {error.where}", hint=error.hint) from error
            origins[name] = origin
        return origins

    def warnings(self, options: ServingOptions) -> tuple[str, ...]:
        """What does not match between the command and what it is given, once the options are filled in."""
        found = []
        if self.version is not None and options.engine is None:
            fitting, sized = nearest_rules(self.version).version, parse_engine(None).version
            if fitting != sized:
                found.append(
                    f"{self.source}: the image has vLLM {self.version}, and the rules are those of {sized}: "
                    f"give --engine vllm@{fitting}"
                )
        match = re.match(r"([0-9]{1,6})x", options.gpu or "")
        tensor = options.tensor_parallel_size or (int(match.group(1)) if match else 1)
        ranks = tensor * (options.pipeline_parallel_size or 1) * (options.data_parallel_size or 1)
        here = self.ranks_here if self.ranks_here is not None else ranks
        if self.gpu_count is not None and self.gpu_count != here:
            of = f" of its {ranks}" if here != ranks else ""
            found.append(f"{self.source}: the command needs {here} GPUs{of} and is given {self.gpu_count}")
        return tuple(found)


def read_command(text: str, *, ignored_flags: Sequence[str] = ()) -> VllmCommand:
    """Model and options of a command such as ``vllm serve MODEL --tensor-parallel-size 2``.

    A flag that may change memory and that kvplan does not handle raises `InputError`, unless it is in
    ``ignored_flags``; harmless ones are listed in ``ignored``.
    """
    commands = read_script(text, lambda _: None, "--vllm-command")
    if len(commands) > 1:
        raise InputError(
            f'"{text.strip()[:60]}" is more than one command',
            where="--vllm-command",
            hint="give the one that starts vLLM",
        )
    start = find_start(commands[0].words, commands[0].environment) if commands else None
    if start is None:
        raise InputError(
            f'"{text.strip()[:60]}" is no vllm command',
            where="--vllm-command",
            hint='write "vllm serve MODEL ..."',
        )
    command = read_start(start, ignored_flags=ignored_flags)
    if "model" in command.unread:
        raise command.unread["model"]
    return command


class _Reader:
    """Words to options, for one command."""

    def __init__(self, start: Start, ignored_flags: Sequence[str]) -> None:
        self.start = start
        self.ignore = {canonical(name.lstrip("$")) for name in ignored_flags}
        self.model: Word | None = None
        self.config_model: Word | None = None
        self.values: dict[str, object] = {}
        self.where: dict[str, str] = {}
        self.unread: dict[str, InputError] = {}
        self.ignored: list[str] = []
        self.scheduling: list[str] = []
        self.dotted: dict[str, tuple[dict[str, object], Word]] = {}
        self.ranks: dict[str, int] = {}

    def at(self, word: Word, name: str = "") -> str:
        """Where a word stands, for an error."""
        place = str(word.place or "--vllm-command")
        return f"{place}, {name}" if name else place

    def run(self, words: Sequence[Word], *, config: bool = False) -> None:
        """Read all words; those of a ``--config`` file come before the others, which win."""
        left = deque(words)
        while left:
            word = left.popleft()
            if word.text == "--" and not word.unknown:
                continue
            if not word.text.startswith("-") or word.text == "-":
                self._free(word, config=config)
            elif re.match(r"-{1,2}[A-Za-z][\w-]*\.", word.text):
                self._dotted(word, left)
            else:
                self._flag(word, left, config=config)

    def _free(self, word: Word, *, config: bool) -> None:
        if word.unknown and word.unknown == word.text and self.model is not None:
            if canonical(word.unknown.strip("${}")) in self.ignore:
                self.ignored.append(word.text)
                return
            raise self.unknown(word, "", hint="set it in the script")
        self._set_model(word, config=config)

    def _set_model(self, word: Word, *, config: bool) -> None:
        if config:
            self.config_model = word
        elif self.model is not None:
            raise InputError(
                f'"{word.text}" is a second model', where=self.at(word), hint="quote values with spaces"
            )
        else:
            self.model = word

    def _dotted(self, word: Word, left: deque[Word]) -> None:
        """``--json-flag.key value`` and ``--json-flag.key+ a,b``: parts of one object."""
        name, equals, inline = word.text.partition("=")
        head, *keys = name.split(".")
        value = word._replace(text=inline) if equals else self._value(left, word)
        self._known(word._replace(text=head))
        self._told(value, name)
        if keys and keys[-1].endswith("+"):
            keys[-1] = keys[-1][:-1]
            content: object = value.text.split(",")
        else:
            content = _json_or_text(value.text)
        tree, _ = self.dotted.setdefault(canonical(head), ({}, word))
        for key in keys[:-1]:
            inner = tree.setdefault(key, {})
            if not isinstance(inner, dict):
                inner = tree[key] = {}
            tree = inner
        before = tree.get(keys[-1])
        tree[keys[-1]] = (
            [*before, *content] if isinstance(before, list) and isinstance(content, list) else content
        )

    def _known(self, word: Word) -> None:
        if look_up(word.text) is None and canonical(word.text) not in self.ignore:
            raise self.unhandled(word, word.text)

    def _flag(self, word: Word, left: deque[Word], *, config: bool) -> None:
        word = _optimization_level(word, left)
        name, equals, inline = word.text.partition("=")
        meaning = look_up(name)
        ignored = canonical(name) in self.ignore or (meaning is not None and meaning.flag.name in self.ignore)
        if meaning is None:
            if not ignored:
                raise self.unhandled(word, name)
            self.ignored.append(name)
            if not equals:
                self._skip_unknown_value(left)
            return
        flag = meaning.flag
        if flag.form == "switch":
            if equals:
                raise InputError(f"{name} takes no value", where=self.at(word), hint=f"write {name} alone")
            self._switch(flag, word, name, on=meaning.on, ignored=ignored)
            return
        values = self._values(flag, word, left, inline if equals else None)
        if ignored:
            self.ignored.append(name)
        elif flag.effect == "model":
            self._set_model(values[0], config=config)
        elif flag.effect == "option":
            self._option(flag, name, values[0])
        elif flag.effect == "read":
            self._told(values[0], name)
            self.read_json(flag, name, values[0], values[0].text)
        elif flag.effect != "config":
            self._leave(flag, name, values)

    def _values(self, flag: Flag, word: Word, left: deque[Word], inline: str | None) -> list[Word]:
        """The words that belong to a flag."""
        if inline is not None:
            return [word._replace(text=inline)]
        if flag.form == "many":
            values = [self._value(left, word)]
            while left and not left[0].text.startswith("-"):
                values.append(left.popleft())
            return values
        if flag.form == "optional" and (not left or left[0].text.startswith("-")):
            return [word._replace(text="")]
        return [self._value(left, word)]

    def _value(self, left: deque[Word], word: Word) -> Word:
        if not left or re.match(r"--?[A-Za-z]", left[0].text):
            name = word.text
            raise InputError(f"{name} has no value", where=self.at(word), hint=f"write {name} VALUE")
        return left.popleft()

    def _skip_unknown_value(self, left: deque[Word]) -> None:
        """Of an unknown flag, whether it has a value is told from what follows.

        A word before the next flag is its value, unless it is the only one left to be the model.
        """
        is_flag = [word.text.startswith("-") for word in left]
        needs_model = self.model is None and self.config_model is None
        if left and not is_flag[0] and not (needs_model and (len(left) < 2 or is_flag[1])):
            left.popleft()

    def _switch(self, flag: Flag, word: Word, name: str, *, on: bool, ignored: bool) -> None:
        if not ignored and flag.effect == "option":
            self.values[flag.target] = on
            self._note(flag.target, word)
            return
        neutral = on is ("on" in flag.neutral)
        if not ignored and not neutral and flag.effect == "memory":
            raise self.unhandled(word, name)
        if not ignored and not neutral and flag.effect == "scheduling":
            self.scheduling.append(name)
        self.ignored.append(name)

    def _leave(self, flag: Flag, name: str, values: Sequence[Word]) -> None:
        """Leave out a flag that changes nothing here."""
        text = values[0].text
        neutral = not values[0].unknown and len(values) == 1 and _is_neutral(text, flag.neutral)
        if flag.effect == "memory" and not neutral:
            raise self.unhandled(values[0], name)
        if flag.effect == "scheduling" and not neutral:
            self.scheduling.append(name)
        if flag.name in ("--data-parallel-size-local", "--nnodes") and text.isdigit():
            self.ranks[flag.name] = int(text[:9])
        self.ignored.append(f"{name} {text}" if flag.effect == "memory" else name)

    def _option(self, flag: Flag, name: str, value: Word) -> None:
        self._note(flag.target, value)
        if value.unknown:
            self.values[flag.target] = None
            self.unread[flag.target] = self.unknown(value, name, hint=f"give {_kvplan_flag(flag.target)}")
            return
        self.unread.pop(flag.target, None)
        self.values[flag.target] = _converted(flag.target, value.text, name, self.at(value))

    def _note(self, option: str, word: Word) -> None:
        if word.place is not None:
            self.where[option] = str(word.place)

    def _told(self, value: Word, name: str) -> None:
        if value.unknown:
            raise self.unknown(value, name, hint="write it out")

    def unknown(self, word: Word, name: str, *, hint: str) -> InputError:
        """The error for a word that only running the script would tell."""
        what = f"{word.unknown} cannot be told without running the script"
        plain = re.fullmatch(r"\$\{?(\w+).*", word.unknown or "")
        if plain:
            what = f"{word.unknown} is not set in the script, or not to one value"
        leave = f", or pass --ignore-flag {plain.group(1)}" if plain and not name else ""
        return InputError(what, where=self.at(word, name), hint=f"{hint}{leave}")

    def unhandled(self, word: Word, name: str) -> InputError:
        """The error for a flag that may change memory."""
        known = canonical(name)
        near = difflib.get_close_matches(known, FLAGS, n=1, cutoff=0.8) if look_up(name) is None else []
        hint = f"pass --ignore-flag {known.lstrip('-')} if it does not matter here"
        return InputError(
            f"{name} is not handled and may change memory",
            where=self.at(word),
            hint=f"did you mean {near[0]}? Else {hint}" if near else hint,
        )

    def environment(self) -> None:
        """Refuse variables that change memory."""
        for name, word in self.start.environment.items():
            neutral = MEMORY_VARIABLES.get(name)
            if neutral is None or word.text in neutral:
                continue
            if canonical(name) in self.ignore:
                self.ignored.append(name)
                continue
            raise InputError(
                f"the variable {name} is not handled and may change memory",
                where=self.at(word),
                hint=f"pass --ignore-flag {name} if it does not matter here",
            )

    # JSON flags

    def read_json(self, flag: Flag, name: str, word: Word, content: object) -> None:
        """Read what matters of a flag that is JSON, or of its dotted forms."""
        if isinstance(content, str) and flag.name != "--optimization-level":
            content = self._parse(content, name, word)
        if content is None:
            return
        if flag.name == "--optimization-level":
            self._level(str(content), name, word)
            return
        if flag.name == "--compilation-config" and isinstance(content, int):
            content = {"mode": content}
        if not isinstance(content, dict):
            raise InputError(f"{name} is no JSON object", where=self.at(word), hint=f"write {name} '{{...}}'")
        if flag.name == "--speculative-config":
            self._speculative(content, name, word)
        elif flag.name == "--compilation-config":
            self._compilation(content, name, word)
        elif flag.name == "--rope-scaling":
            self._overrides({"rope_scaling": content}, word)
        else:
            self._overrides(content, word, name)

    def _parse(self, text: str, name: str, word: Word) -> object:
        if text in ("", "None"):
            return None
        try:
            content: object = json.loads(_expand_numbers(text))
        except (ValueError, RecursionError) as error:
            shown = getattr(error, "msg", "nested too deeply")
            raise InputError(
                f"{name} is no JSON: {shown}", where=self.at(word), hint=f"write {name} '{{...}}'"
            ) from error
        return content

    def _key(self, name: str, key: str, word: Word) -> None:
        """Refuse a key that may change memory."""
        if canonical(f"{name}.{key}") in self.ignore:
            self.ignored.append(f"{name}.{key}")
            return
        raise self.unhandled(word, f"{name}.{key}")

    def _speculative(self, content: Mapping[str, object], name: str, word: Word) -> None:
        for key, value in content.items():
            option = SPECULATIVE_OPTIONS.get(key)
            if option is not None and value is not None:
                if isinstance(value, bool) or not isinstance(
                    value, int if option.startswith("num_") else str
                ):
                    raise InputError(
                        f'{name}.{key} is "{value}"',
                        where=self.at(word),
                        hint="write a whole number" if option.startswith("num_") else "write a text",
                    )
                self.values[option] = value
                self._note(option, word)
            elif option is None and value is not None and key not in SPECULATIVE_HARMLESS:
                self._key(name, key, word)

    def _compilation(self, content: Mapping[str, object], name: str, word: Word) -> None:
        for key, value in content.items():
            text = str(value).rpartition(".")[2].upper()
            if key == "cudagraph_mode" and text in ("NONE", "0"):
                self.values["enforce_eager"] = True
                self._note("enforce_eager", word)
            elif value is None or key in COMPILATION_HARMLESS or text in COMPILATION_NEUTRAL.get(key, ()):
                continue
            elif key in ("mode", "level") and text in ("0", "NONE"):
                self._level("0", name, word)
            else:
                self._key(name, key, word)

    def _level(self, text: str, name: str, word: Word) -> None:
        """``-O0`` captures no graphs; ``-O2`` is the default and ``-O3`` equals it (config/vllm.py)."""
        if text == "0":
            self.values["enforce_eager"] = True
            self._note("enforce_eager", word)
        elif text not in ("2", "3"):
            raise self.unhandled(word, f"{name} {text}")
        else:
            self.ignored.append(f"{name} {text}")

    def _overrides(self, content: Mapping[str, object], word: Word, name: str = "--hf-overrides") -> None:
        """Fields of the model's config, as ``--set`` takes them."""
        changes: list[str] = []
        for key, value in content.items():
            if key in ("architectures", "model_type"):
                self._key(name, key, word)
            elif key == "text_config" and isinstance(value, dict):
                changes.extend(f"{k}={_set_value(v)}" for k, v in value.items())
            else:
                changes.append(f"{key}={_set_value(value)}")
        before = self.values.get("set", ())
        self.values["set"] = (*before, *changes) if isinstance(before, tuple) else tuple(changes)

    def finish(self) -> VllmCommand:
        """What was read."""
        for name, (content, word) in self.dotted.items():
            meaning = look_up(name)
            if name in self.ignore:
                self.ignored.append(name)
            elif meaning is None or meaning.flag.effect == "memory":
                raise self.unhandled(word, name)
            elif meaning.flag.effect == "read":
                self.read_json(meaning.flag, name, word, content)
            else:
                self.ignored.append(name)
        model = self.model or self.config_model
        if model is None:
            raise InputError(
                "the command names no model",
                where=str(self.start.place or "--vllm-command"),
                hint='write "vllm serve MODEL ..."',
            )
        if model.unknown:
            self.unread["model"] = self.unknown(
                model, "", hint="write it out, or name the model beside the file"
            )
        return VllmCommand(
            model.text,
            self.values,
            tuple(self.ignored),
            self.where,
            self.start.place,
            self.unread,
            tuple(self.scheduling),
            self._gpu_count(),
            self._ranks_here(),
            self.start.version,
        )

    def _gpu_count(self) -> int | None:
        visible = self.start.environment.get("CUDA_VISIBLE_DEVICES")
        if visible is not None and visible.text and not visible.unknown and visible.text != "all":
            return len(visible.text.split(","))
        return self.start.gpu_count

    def _ranks_here(self) -> int | None:
        """GPUs that this one command drives, where it says that others run elsewhere."""
        if not self.ranks:
            return None

        def size(option: str) -> int:
            value = self.values.get(option)
            return value if isinstance(value, int) else 1

        data = self.ranks.get("--data-parallel-size-local", size("data_parallel_size"))
        ranks = size("tensor_parallel_size") * size("pipeline_parallel_size") * data
        return max(1, ranks // max(1, self.ranks.get("--nnodes", 1)))


def read_start(
    start: Start,
    *,
    ignored_flags: Sequence[str] = (),
    read_config: Callable[[Word], Sequence[Word]] | None = None,
) -> VllmCommand:
    """Model and options of a command that starts vLLM.

    ``read_config`` gives the words of a ``--config`` file, by default of one in the working folder. Raises
    `InputError` for a flag that may change memory and is not in ``ignored_flags``.
    """
    reader = _Reader(start, ignored_flags)
    for word in _config_files(start.words):
        reader.run((read_config or _config_beside)(word), config=True)
    reader.run(start.words)
    reader.environment()
    return reader.finish()


def _config_files(words: Sequence[Word]) -> Iterable[Word]:
    for at, word in enumerate(words):
        if word.text == "--config" and at + 1 < len(words):
            yield words[at + 1]
        elif word.text.startswith("--config="):
            yield word._replace(text=word.text.partition("=")[2])


def _config_beside(word: Word) -> Sequence[Word]:
    return words_of_config(Path(word.text), word.text)


def words_of_config(path: Path, name: str, *, root: Node | None = None) -> list[Word]:
    """The flags that a vLLM ``--config`` file stands for, as argparse_utils.py ``load_config_file`` makes them.

    ``root`` is what it holds, if that was read already.
    """
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(
            f'"{name}" is no YAML file by its name', where="--config", hint="vLLM takes .yaml and .yml"
        )
    words: list[Word] = []
    for key, node in (root or read_yaml(path, name=name)).mapping("the config file").items():
        value = node.value()
        head = Word(f"--{key}", node.key_place)
        if isinstance(value, bool):
            words.append(head if value else head._replace(text=f"--no-{key}"))
        elif isinstance(value, list):
            items = [Word(str(item), node.place) for item in value]
            words.extend([head, *items] if items else [])
        elif isinstance(value, dict):
            words.extend([head, Word(json.dumps(value), node.place)])
        else:
            words.extend([head, Word(str(value), node.place)])
    return words


def _optimization_level(word: Word, left: deque[Word]) -> Word:
    """``-O3``, ``-O=3`` and ``-O 3`` written out; ``-O {...}`` is JSON, as it was up to 0.11."""
    if match := re.fullmatch(r"-O=?([0-9]+)", word.text):
        return word._replace(text=f"--optimization-level={match.group(1)}")
    if word.text == "-O" and left and left[0].text.isdigit():
        return word._replace(text="--optimization-level")
    return word


def _is_neutral(text: str, neutral: frozenset[str]) -> bool:
    if text in neutral or text.lower() in neutral:
        return True
    try:
        return "0" in neutral and float(text) == 0
    except ValueError:
        return False


def _kvplan_flag(option: str) -> str:
    return f"{flag(option)} to kvplan"


def _json_or_text(text: str) -> object:
    try:
        content: object = json.loads(_expand_numbers(text))
    except (ValueError, RecursionError):
        return text
    return content


def _expand_numbers(text: str) -> str:
    """``80m`` outside quotes as a number, as arg_utils.py ``_expand_json_human_readable_numbers`` does."""
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(
            r"\b[0-9]{1,18}(?:\.[0-9]{1,6})?[kKmMgG]\b",
            lambda match: str(parse_count(match.group(), where="--vllm-command")),
            parts[at],
        )
    return "".join(parts)


def _set_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _converted(option: str, text: str, name: str, place: str) -> object:
    """The value of an option as vLLM reads it; None where the text stands for the default."""
    if option == "max_model_len" and text.lower() in ("auto", "-1"):
        return "auto"
    kinds = SimulateOptions.kinds(option)
    if int in kinds:
        return None if text == "None" else parse_count(text, where=f"{place}, {name}")
    if float not in kinds:
        return None if text in ("None", "") else text
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f'{name} is "{text}", not a number', where=place, hint="write 0.9") from error
