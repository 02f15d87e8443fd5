"""Shell scripts as the commands that they would run. Nothing is executed: only text is put together.

Read are words, quotes, comments, line continuations, here-documents, plain and array variables of the script itself and
``${NAME:-default}``. What only running it could tell (``$(...)``, ``$1``, variables of the caller, a variable set in an
``if``) stays in the word as it is written, and the word says so.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvplan.errors import InputError
from kvplan.safe_yaml import Place

#: A script that starts a server is far shorter; a longer text would only cost time before it is refused.
MAX_SCRIPT = 256 << 10
#: Characters that variables may grow to: variables of variables can stand for billions.
_MAX_EXPANSION = 1 << 20
_MAX_DEPTH = 40

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_PLAIN = re.compile(r"""[^ \t\r\n'"\\$`;&|()<>]+""")
_DOUBLE_QUOTED = re.compile(r'[^"\\$`]+')
_OPENS = frozenset({"if", "for", "while", "until", "case", "select"})
_CLOSES = frozenset({"fi", "done", "esac"})
_SKIPPED = frozenset({"then", "else", "elif", "do", "{", "}", "!", "function", "time"})
_DECLARES = frozenset({"export", "readonly", "local", "declare", "typeset"})

#: The place of an offset in a text; None where there is none to name.
Locate = Callable[[int], "Place | None"]


class Word(NamedTuple):
    """One word of a command, where it stands, and what in it only running could tell, as it is written.

    ``locate`` gives the places inside a word of several lines.
    """

    text: str
    place: Place | None
    unknown: str | None = None
    locate: Locate | None = None


class Command(NamedTuple):
    """A simple command: its words, and the environment that it is given."""

    words: tuple[Word, ...]
    environment: Mapping[str, Word]


class _Part(NamedTuple):
    """A piece of a word: ``kind`` is text, variable or output (of a command, which is not run)."""

    kind: str
    text: str
    quoted: bool
    operator: str = ""
    otherwise: str = ""


class _Token(NamedTuple):
    """``kind`` is word, array or operator."""

    kind: str
    offset: int
    parts: tuple[_Part, ...] = ()
    items: tuple[_Token, ...] = ()
    text: str = ""


class _Variable(NamedTuple):
    words: tuple[Word, ...]
    is_array: bool


def locate_lines(text: str, file: str) -> Locate:
    """Places in a text that is a whole file."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def locate(offset: int) -> Place:
        line = bisect_right(starts, offset)
        return Place(file, line, offset - starts[line - 1] + 1)

    return locate


def split_words(text: str, locate: Locate, where: str) -> tuple[Word, ...]:
    """The words of one line without a shell: quotes count, variables and operators are plain text."""
    words: list[Word] = []
    for match in re.finditer(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|(['"\\]))+""", text, re.DOTALL):
        if match.group(1):
            raise _unreadable("a quote is not closed", locate(match.start(1)), where)
        bare = re.sub(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)""", _unquote, match.group(), flags=re.DOTALL)
        words.append(Word(bare, locate(match.start())))
    return tuple(words)


def _unquote(match: re.Match[str]) -> str:
    if match.group(2) is not None:
        return re.sub(r'\\(["\\$`])', r"\1", match.group(2))
    return match.group(1) if match.group(1) is not None else match.group(3)


def read_script(
    text: str, locate: Locate, where: str, environment: Mapping[str, Word] | None = None
) -> list[Command]:
    """The commands of a script, in its order, with its variables filled in.

    ``environment`` are variables that it is started with; ``where`` names the text in errors without a place. Raises
    `InputError` where the text cannot be read as a script.
    """
    if len(text) > MAX_SCRIPT:
        raise InputError(
            f"the script is longer than {MAX_SCRIPT >> 10} KiB", where=where, hint="give the command alone"
        )
    return _Interpreter(locate, where, environment or {}).run(_Lexer(text, locate, where).tokens())


def _unreadable(what: str, place: Place | None, where: str) -> InputError:
    return InputError(
        f"the command cannot be read: {what}",
        where=str(place) if place else where,
        hint="close what was opened",
    )


class _Lexer:
    """Text to tokens, one pass."""

    def __init__(self, text: str, locate: Locate, where: str) -> None:
        self._text = text
        self._at = 0
        self._locate = locate
        self._where = where
        self._documents: list[str] = []
        self._depth = 0

    def tokens(self, closing: str = "") -> list[_Token]:
        """All tokens up to the end, or up to ``closing``, an unquoted parenthesis."""
        found: list[_Token] = []
        text = self._text
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error("parentheses are nested too deeply", self._at)
        while self._at < len(text):
            char = text[self._at]
            if closing and char == closing:
                self._at += 1
                self._depth -= 1
                return found
            if char in " \t\r":
                self._at += 1
            elif text.startswith("\\\n", self._at):
                self._at += 2
            elif text.startswith("\\\r\n", self._at):
                self._at += 3
            elif char == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif char in "\n;&|()":
                found.append(self._operator(char))
            elif char in "<>":
                self._redirection()
            else:
                token = self._word()
                if token is not None:
                    found.append(token)
        if closing:
            raise self._error("a parenthesis is not closed", len(text))
        return found

    def _error(self, what: str, offset: int) -> InputError:
        return _unreadable(what, self._locate(max(0, min(offset, len(self._text) - 1))), self._where)

    def _operator(self, char: str) -> _Token:
        start = self._at
        pair = self._text[start : start + 2]
        operator = pair if pair in ("&&", "||", ";;", ";&", "|&") else char
        if pair == "&>":
            self._at += 1
            self._redirection()
            return _Token("operator", start, text="redirection")
        self._at += len(operator)
        if char == "\n" and self._documents:
            self._skip_documents()
        return _Token("operator", start, text=operator)

    def _redirection(self) -> None:
        """Step over ``> file`` and the like; of a here-document the delimiter is kept for the end of the line."""
        text, start = self._text, self._at
        if text[start + 1 : start + 2] == "(":  # the output of a command as a file
            self._at += 2
            self.tokens(")")
            return
        while self._at < len(text) and text[self._at] in "<>&-|":
            self._at += 1
        sign = text[start : self._at]
        while self._at < len(text) and text[self._at] in " \t":
            self._at += 1
        if sign.endswith("&-") or self._at >= len(text) or text[self._at] in "\n;&|()<>":
            return
        token = self._word()
        if sign.rstrip("-") == "<<" and token is not None:
            self._documents.append("".join(part.text for part in token.parts))

    def _skip_documents(self) -> None:
        for delimiter in self._documents:
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = end + 1
                if line.strip() == delimiter:
                    break
        self._documents.clear()
        self._at = min(self._at, len(self._text))

    def _word(self) -> _Token | None:
        """A word, or an array assignment; None for the number of a redirection."""
        text, start = self._text, self._at
        parts: list[_Part] = []
        while self._at < len(text):
            char = text[self._at]
            if char == "\\":
                if text.startswith("\\\n", self._at) or text.startswith("\\\r\n", self._at):
                    break
                parts.append(_Part("text", text[self._at + 1 : self._at + 2], quoted=True))
                self._at += 2
            elif char == "'":
                end = text.find("'", self._at + 1)
                if end < 0:
                    raise self._error("a quote is not closed", self._at)
                parts.append(_Part("text", text[self._at + 1 : end], quoted=True))
                self._at = end + 1
            elif char == '"':
                parts.extend(self._double_quoted())
            elif char in "$`":
                parts.append(self._dollar(quoted=False))
            elif match := _PLAIN.match(text, self._at):
                parts.append(_Part("text", match.group(), quoted=False))
                self._at = match.end()
                opens = text.startswith("(", self._at) and len(parts) == 1
                if opens and _ASSIGNMENT.fullmatch(match.group()):
                    self._at += 1
                    items = tuple(token for token in self.tokens(")") if token.kind == "word")
                    return _Token("array", start, tuple(parts), items)
            else:
                break
        if self._at < len(text) and text[self._at] in "<>" and text[start : self._at].isdigit():
            self._redirection()
            return None
        return _Token("word", start, tuple(parts))

    def _double_quoted(self) -> list[_Part]:
        text, start = self._text, self._at
        parts = [_Part("text", "", quoted=True)]
        self._at += 1
        while self._at < len(text):
            char = text[self._at]
            if char == '"':
                self._at += 1
                return parts
            if char == "\\":
                follows = text[self._at + 1 : self._at + 2]
                kept = "" if follows == "\n" else follows if follows in '"\\$`' else f"\\{follows}"
                parts.append(_Part("text", kept, quoted=True))
                self._at += 2
            elif char in "$`":
                parts.append(self._dollar(quoted=True))
            else:
                match = _DOUBLE_QUOTED.match(text, self._at)
                assert match is not None, "every other character is handled above"
                parts.append(_Part("text", match.group(), quoted=True))
                self._at = match.end()
        raise self._error("a quote is not closed", start)

    def _dollar(self, *, quoted: bool) -> _Part:
        """A variable, or the output of a command."""
        text, start = self._text, self._at
        if text[start] == "`":
            end = text.find("`", start + 1)
            if end < 0:
                raise self._error("a backquote is not closed", start)
            self._at = end + 1
            return _Part("output", text[start : self._at], quoted)
        if text.startswith("$(", start):
            self._at = self._closing(start + 1, "(", ")")
            return _Part("output", text[start : self._at], quoted)
        if text.startswith("${", start):
            self._at = self._closing(start + 1, "{", "}")
            inner = text[start + 2 : self._at - 1]
            match = re.match(r"([A-Za-z_]\w*(?:\[[@*]\])?)(?:(:?[-=+?])(.*))?\Z", inner, re.DOTALL)
            if match:
                return _Part("variable", match.group(1), quoted, match.group(2) or "", match.group(3) or "")
            return _Part("output", text[start : self._at], quoted)
        if name := _NAME.match(text, start + 1):
            self._at = name.end()
            return _Part("variable", name.group(), quoted)
        if start + 1 < len(text) and text[start + 1] in "@*#?$!-0123456789":
            self._at = start + 2
            kind = "arguments" if text[start + 1] in "@*" else "output"
            return _Part(kind, text[start : self._at], quoted)
        if text.startswith("$'", start) and not quoted:
            end = text.find("'", start + 2)
            if end < 0:
                raise self._error("a quote is not closed", start)
            self._at = end + 1
            return _Part("text", text[start + 2 : end], quoted=True)
        self._at = start + 1
        return _Part("text", "$", quoted)

    def _closing(self, start: int, opens: str, closes: str) -> int:
        """The offset behind the bracket that closes the one at ``start``; quotes are stepped over."""
        text, depth, at = self._text, 0, start
        brackets = re.compile(rf"""[\\'"{re.escape(opens + closes)}]""")
        while match := brackets.search(text, at):
            char, at = match.group(), match.end()
            if char == "\\":
                at += 1
            elif char in "'\"":
                end = text.find(char, at)
                if end < 0:
                    break
                at = end + 1
            else:
                depth += 1 if char == opens else -1
                if depth == 0:
                    return at
        raise self._error(f'"{text[start]}" is not closed', start)


class _Interpreter:
    """Tokens to commands: keeps the variables."""

    def __init__(self, locate: Locate, where: str, environment: Mapping[str, Word]) -> None:
        self._locate = locate
        self._where = where
        self._variables = {name: _Variable((word,), is_array=False) for name, word in environment.items()}
        self._exported = set(environment)
        self._left = _MAX_EXPANSION
        self._open = 0

    def run(self, tokens: list[_Token]) -> list[Command]:
        """All commands; a variable that is set under a condition is known no more, unless its value stays."""
        commands: list[Command] = []
        group: list[_Token] = []
        conditional = False
        for token in [*tokens, _Token("operator", 0, text="\n")]:
            if token.kind != "operator":
                group.append(token)
                continue
            if token.text == "redirection":
                continue
            command = self._command(group, conditional=conditional)
            if command is not None:
                commands.append(command)
            group = []
            conditional = token.text in ("&&", "||")
        return commands

    def _command(self, tokens: list[_Token], *, conditional: bool) -> Command | None:
        tokens = self._without_keywords(tokens)
        conditional = conditional or self._open > 0
        first = 0
        while first < len(tokens) and _assigned(tokens[first]):
            first += 1
        if first == len(tokens):
            for token in tokens:
                self._assign(token, conditional=conditional)
            return None
        word = _plain(tokens[first])
        if word in _DECLARES:
            self._declare(word, tokens[first + 1 :], conditional=conditional)
            return None
        environment = {
            name: self._variables[name].words[0]
            for name in sorted(self._exported)
            if name in self._variables and self._variables[name].words
        }
        for token in tokens[:first]:  # these hold for the one command
            name, variable = self._value(token)
            if variable.words:
                environment[name] = variable.words[0]
        words = tuple(field for token in tokens[first:] for field in self._fields(token))
        if word == "unset":
            for field in words[1:]:
                self._variables.pop(field.text, None)
            return None
        return Command(words, environment) if words else None

    def _without_keywords(self, tokens: list[_Token]) -> list[_Token]:
        first = 0
        while first < len(tokens):
            word = _plain(tokens[first])
            if word in _OPENS:
                self._open += 1
            elif word in _CLOSES:
                self._open -= 1
            elif word not in _SKIPPED:
                break
            first += 1
        return tokens[first:]

    def _declare(self, how: str, tokens: list[_Token], *, conditional: bool) -> None:
        exports = how == "export"
        for token in tokens:
            word = _plain(token)
            if _assigned(token):
                name = self._assign(token, conditional=conditional)
                if exports:
                    self._exported.add(name)
            elif word is not None and word.startswith("-"):
                exports = exports or "x" in word
            elif word is not None and exports:
                self._exported.add(word)

    def _assign(self, token: _Token, *, conditional: bool) -> str:
        name, variable = self._value(token)
        before = self._variables.get(name)
        if conditional and before != variable:
            same = before is not None and [w.text for w in before.words] == [w.text for w in variable.words]
            if not same:
                place = self._locate(token.offset)
                variable = _Variable((Word(f"${name}", place, f"${name}"),), is_array=False)
        self._variables[name] = variable
        return name

    def _value(self, token: _Token) -> tuple[str, _Variable]:
        """Name and value of an assignment."""
        match = _ASSIGNMENT.match(token.parts[0].text)
        assert match is not None, "the caller has looked"
        name, adds = match.group(1), bool(match.group(2))
        place = self._locate(token.offset)
        before = self._variables.get(name) if adds else None
        if token.kind == "array":
            words = tuple(field for item in token.items for field in self._fields(item))
            return name, _Variable((*(before.words if before else ()), *words), is_array=True)
        rest = token.parts[0]._replace(text=token.parts[0].text[match.end() :])
        # No word of an assignment is split.
        parts = [part._replace(quoted=True) for part in (rest, *token.parts[1:])]
        fields = self._expand(parts, place, 0)
        text = " ".join(field.text for field in fields)
        unknown = next((field.unknown for field in fields if field.unknown), None)
        if before and before.words:
            text, unknown = before.words[0].text + text, before.words[0].unknown or unknown
        return name, _Variable((Word(text, place, unknown),), is_array=False)

    def _fields(self, token: _Token) -> list[Word]:
        """The words that a word becomes."""
        return self._expand(token.parts, self._locate(token.offset), 0)

    def _expand(self, parts: tuple[_Part, ...] | list[_Part], place: Place | None, depth: int) -> list[Word]:
        if depth > _MAX_DEPTH:
            raise InputError("variables are nested too deeply", where=self._at(place), hint="write them out")
        fields: list[Word] = []
        pending: Word | None = None
        alone = sum(1 for part in parts if part.text) == 1
        vanishes = False
        for part in parts:
            if part.kind == "text":
                if part.text or part.quoted:
                    pending = _joined(pending, Word(part.text, place))
                continue
            if part.kind == "output":
                pending = _joined(pending, Word(part.text, place, part.text))
                continue
            if part.kind == "arguments":
                vanishes = True  # a script that is started as it is has none
                continue
            words, is_array = self._look_up(part, place, depth)
            vanishes = vanishes or (is_array and not words)
            if not words and (is_array or not part.quoted):
                continue
            for number, piece in enumerate(self._pieces(words, place, is_array=is_array, quoted=part.quoted)):
                if number:
                    assert pending is not None, "the piece before was added"
                    fields.append(pending)
                    pending = None
                here = piece.place if alone else place
                pending = _joined(pending, Word(piece.text, here, piece.unknown))
        if pending is not None and (pending.text or not vanishes):
            fields.append(pending)
        return fields

    def _pieces(
        self, words: tuple[Word, ...], place: Place | None, *, is_array: bool, quoted: bool
    ) -> list[Word]:
        """What the value of a variable becomes: its words, one word, or split at blanks."""
        pieces: list[Word] = []
        if is_array and quoted:
            pieces = list(words)
        elif quoted:
            text = " ".join(word.text for word in words)
            unknown = next((word.unknown for word in words if word.unknown), None)
            pieces = [Word(text, words[0].place if words else place, unknown)]
        else:
            for word in words:
                if word.unknown and word.text == word.unknown:
                    pieces.append(word)
                else:
                    pieces.extend(Word(one, word.place, word.unknown) for one in word.text.split())
        self._left -= sum(len(word.text) + 1 for word in pieces)
        if self._left < 0:
            raise InputError(
                f"the variables stand for more than {_MAX_EXPANSION >> 20} MiB of text",
                where=self._at(place),
                hint="write the command out",
            )
        return pieces

    def _look_up(self, part: _Part, place: Place | None, depth: int) -> tuple[tuple[Word, ...], bool]:
        """The value of a variable, its ``:-`` default and the like included."""
        name, _, index = part.text.partition("[")
        variable = self._variables.get(name)
        words = variable.words if variable else ()
        if variable is not None and variable.is_array and not index:
            words = words[:1]
        missing = variable is None or (part.operator.startswith(":") and not any(w.text for w in words))
        kind = part.operator.removeprefix(":")
        if kind == "+":
            return ((), False) if missing else (self._default(part, place, depth), False)
        if not missing or (variable is not None and not kind):
            return words, bool(index)
        if kind in ("-", "="):
            words = self._default(part, place, depth)
            if kind == "=":
                self._variables[name] = _Variable(words, is_array=False)
            return words, False
        written = f"${{{part.text}}}" if index else f"${name}"
        return (Word(written, place, written),), False

    def _default(self, part: _Part, place: Place | None, depth: int) -> tuple[Word, ...]:
        text = part.otherwise if {"'", '"'} & set(part.otherwise) else f'"{part.otherwise}"'
        tokens = _Lexer(text, lambda _: place, self._where).tokens()
        parts = [one._replace(quoted=True) for token in tokens for one in token.parts]
        return tuple(self._expand(parts, place, depth + 1))

    def _at(self, place: Place | None) -> str:
        return str(place) if place else self._where


def _joined(before: Word | None, more: Word) -> Word:
    """A word with more behind it, at the place where it begins."""
    if before is None or not (before.text or before.unknown):
        return more
    return Word(before.text + more.text, before.place, before.unknown or more.unknown)


def _assigned(token: _Token) -> bool:
    """Whether a token is an assignment."""
    return token.kind == "array" or (
        bool(token.parts)
        and token.parts[0].kind == "text"
        and not token.parts[0].quoted
        and _ASSIGNMENT.match(token.parts[0].text) is not None
    )


def _plain(token: _Token) -> str | None:
    """The text of a word that has neither quotes nor variables."""
    if token.kind == "word" and len(token.parts) == 1 and not token.parts[0].quoted:
        return token.parts[0].text if token.parts[0].kind == "text" else None
    return None
