"""Shell scripts read as text: what bash would run, word for word, without running it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import InputError
from kvplan.shell import Word, locate_lines, read_script, split_words


def commands(text: str) -> list[list[str]]:
    return [
        [word.text for word in one.words] for one in read_script(text, locate_lines(text, "s.sh"), "s.sh")
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b  c", [["a", "b", "c"]]),
        ("a 'b c' \"d e\" f\\ g", [["a", "b c", "d e", "f g"]]),
        ("a b # c\n# d\ne", [["a", "b"], ["e"]]),
        ("a#b", [["a#b"]]),
        ("a \\\n  b \\\r\n c", [["a", "b", "c"]]),
        ("a; b && c || d | e & f\n\ng", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"], ["g"]]),
        ("a > b 2>&1 < c &> d >>e", [["a"]]),
        ("a 2 > b", [["a", "2"]]),
        ("a <<X b\nc d\nX\ne", [["a", "b"], ["e"]]),
        ("a <<-'X'\n\tc\n\tX\ne", [["a"], ["e"]]),
        ("a <<< 'b c'", [["a"]]),
        ("X=1; a $X ${X}2 '$X' \"$X\"", [["a", "1", "12", "$X", "1"]]),
        ("X='1 2'; a $X \"$X\" x$X", [["a", "1", "2", "1 2", "x1", "2"]]),
        ("X=; a $X b \"$X\"", [["a", "b", ""]]),
        ("X=(1 '2 3' 4); a \"${X[@]}\" ${X[@]}", [["a", "1", "2 3", "4", "1", "2", "3", "4"]]),
        ("X=(1\n 2 # two\n); X+=(3); a ${X[*]}", [["a", "1", "2", "3"]]),
        ("X=(); a \"${X[@]}\"", [["a"]]),
        ("X=1; X+=2; a $X", [["a", "12"]]),
        ("a ${X:-1} ${X-2} \"${X:=3 4}\" $X", [["a", "1", "2", "3 4", "3", "4"]]),
        ("X=; a ${X:-1} ${X-2}", [["a", "1"]]),
        ("X=1; a ${X:-2} ${X:+3} ${Y:+4}", [["a", "1", "3"]]),
        ("a ${X:-${Y:-z}}", [["a", "z"]]),
        ("export X=1 Y=2; a $X$Y", [["a", "12"]]),
        ("declare -x X=1; readonly Y=2; a $X $Y", [["a", "1", "2"]]),
        ("X=1 a b", [["a", "b"]]),
        ("X=1; unset X; a ${X:-2}", [["a", "2"]]),
        ("exec a \"$@\" $*", [["exec", "a"]]),
        ("if true; then a b; else c; fi", [["true"], ["a", "b"], ["c"]]),
        ("f() {\n  a b\n}\nf", [["f"], ["a", "b"], ["f"]]),
        ("(cd x; a)", [["cd", "x"], ["a"]]),
        ("a $'b'", [["a", "b"]]),
        ("a b$", [["a", "b$"]]),
        ("", []),
        ("# only\n", []),
    ],
)  # fmt: skip
def test_a_script_is_read_as_the_commands_that_it_runs(text: str, expected: list[list[str]]) -> None:
    assert commands(text) == expected


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("a $X", "$X"),
        ("a \"x $X\"", "$X"),
        ("a $(b c)", "$(b c)"),
        ("a `b c`", "`b c`"),
        ("a $1", "$1"),
        ("a ${X%y}", "${X%y}"),
        ("a $((1 + 2))", "$((1 + 2))"),
        ("X=$(b); a $X", "$(b)"),
        ("if b; then X=1; else X=2; fi; a $X", "$X"),
        ("X=1; b && X=2; a $X", "$X"),
        ("for X in 1 2; do a $X; done", "$X"),
        ("case b in c) X=1;; esac; a $X", "$X"),
    ],
)  # fmt: skip
def test_what_only_running_could_tell_is_said_by_the_word(text: str, unknown: str) -> None:
    words = [word for one in read_script(text, lambda _: None, "") for word in one.words if word.unknown]
    assert [word.unknown for word in words] == [unknown]


def test_a_condition_that_changes_nothing_is_none() -> None:
    assert commands("X=1; if b; then X=1; fi; a $X")[-1] == ["a", "1"]


def test_only_exported_variables_and_those_before_a_command_reach_it() -> None:
    (command,) = read_script("A=1; export B=2; C=3 x", lambda _: None, "")
    assert {name: word.text for name, word in command.environment.items()} == {"B": "2", "C": "3"}


def test_words_know_where_they_come_from() -> None:
    text = "TP=4\nARGS=(\n  --x 1\n)\nrun a \\\n  --tp $TP ${ARGS[@]}\n"
    (command,) = read_script(text, locate_lines(text, "s.sh"), "s.sh")
    places = {word.text: str(word.place) for word in command.words}
    assert places == {
        "run": "s.sh:5:1",
        "a": "s.sh:5:5",
        "--tp": "s.sh:6:3",
        "4": "s.sh:1:1",
        "--x": "s.sh:3:3",
        "1": "s.sh:3:7",
    }


@pytest.mark.parametrize(
    "text",
    ["a 'b", 'a "b', "a `b", "a $(b", "a ${b", "X=(a", "a $'b", "A=(" * 1000, "cat " + "<(" * 1000],
)
def test_what_is_opened_and_not_closed_is_an_error(text: str) -> None:
    with pytest.raises(InputError) as caught:
        read_script(text, locate_lines(text, "s.sh"), "s.sh")
    assert "cannot be read" in caught.value.what
    assert str(caught.value.where).startswith("s.sh:1:")


@pytest.mark.parametrize(
    "text",
    [
        "A=aaaaaaaa\n" + "A=$A$A$A$A$A$A$A$A\n" * 30 + "a $A",
        "A=(a a)\n" + 'A=("${A[@]}" "${A[@]}" "${A[@]}")\n' * 30 + "a ${A[@]}",
        "a " + "${A:-" * 500 + "x" + "}" * 500,
        "a " * (1 << 20),
    ],
)
def test_a_script_that_grows_without_end_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        read_script(text, lambda _: None, "s.sh")


@given(st.text(alphabet="ab1 \n\t\r\x0b\u2028\x00'\"\\$(){};&|<>#=-+:@`", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read_script(text, locate_lines(text, "s.sh"), "s.sh")
    except InputError:
        return


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash to compare with")
@given(
    st.lists(
        st.sampled_from(
            ["a", "'b c'", '"d e"', "f\\ g", "$X", '"$X"', "x$Y", "${Z:-1 2}", '"${Z:-3 4}"', '"${L[@]}"', "\\$X",
             "\\\n", "'$X'", '"a\\"b"', "${X:+y}", "${L[*]}", "a#b"]
        ),
        max_size=8,
    )
)  # fmt: skip
def test_words_are_those_of_bash(words: list[str]) -> None:
    text = "X='p q'; Y=r; L=(s 't u' v)\nshow " + " ".join(words) + "\n"
    script = 'show() { printf "%s\\0" "$@" end; }\n' + text
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=20)
    assert commands(text)[-1][1:] == ran.stdout.split("\0")[:-2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a \'b c\' "d \\" e" f\\ g', ["a", "b c", 'd " e', "f g"]),
        ("$X ; | #", ["$X", ";", "|", "#"]),
        ("", []),
    ],
)
def test_a_line_without_a_shell_is_split_at_blanks(text: str, expected: list[str]) -> None:
    assert [word.text for word in split_words(text, lambda _: None, "")] == expected


def test_variables_of_the_caller_can_be_given() -> None:
    (command,) = read_script("a $X", lambda _: None, "", {"X": Word("1", None)})
    assert [word.text for word in command.words] == ["a", "1"]


def test_nothing_is_executed(tmp_path: Path) -> None:
    made = tmp_path / "made"
    read_script(f"a $(touch {made}) `touch {made}`; touch {made}", lambda _: None, "")
    assert not made.exists()
