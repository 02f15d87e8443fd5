"""Printed configurations become plain values; nothing of them is evaluated."""

from __future__ import annotations

import time

import pytest

from kvplan.python_repr import read_fields


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("a=1, b='x', c=None, d=True", {"a": 1, "b": "x", "c": None, "d": True}),
        ("{'a': 1, 'b': {'c': [1, 2]}}", {"a": 1, "b": {"c": [1, 2]}}),
        ("ServerArgs(a=0.87, b=-1)", {"a": 0.87, "b": -1}),
        ("a=1 b='x y' c=K(d=True)", {"a": 1, "b": "x y", "c": {"d": True}}),
        ("dtype=torch.bfloat16, f=LoadFormat.AUTO", {"dtype": "torch.bfloat16", "f": "LoadFormat.AUTO"}),
        (
            "m=<Mode.FAST: 3>, g=<function <lambda> at 0x7f>, n=2",
            {"m": "Mode.FAST", "g": "function <lambda> at 0x7f", "n": 2},
        ),
        ("c={'m': <Mode.FULL: (2, 1)>, <Key.A: 1>: 2}, n=2", {"c": {"m": "Mode.FULL"}, "n": 2}),
        ("p=PosixPath('/m'), e={}, t=(), s={'x'}", {"p": "/m", "e": {}, "t": [], "s": ["x"]}),
        ('c={"level":3,"dir":""}, n=1', {"c": {"level": 3, "dir": ""}, "n": 1}),
        (r"a='it\'s', b=1", {"a": "it's", "b": 1}),
        ("a=1, b='cut in the mid", {"a": 1, "b": None}),
        ("a=cuda:0, b=2", {"a": "cuda", "b": 2}),
        ("", {}),
        ("no fields here", {}),
        ("a=__import__('os').system('touch made'), b=1", {"a": "os", "b": 1}),
    ],
)
def test_fields_are_read(text: str, fields: dict[str, object]) -> None:
    assert read_fields(text) == fields


@pytest.mark.parametrize(
    "text",
    ["(" * 200_000, "<" * 200_000, "'" * 200_001, "a=(" * 70_000, "a=<" * 70_000, "\\'" * 100_000, "a='" * 70_000,
     "x=1," * 70_000, "b'" + "\\" * 200_000, "9" * 200_000, "a={" * 70_000 + "}" * 70_000],
    ids=range(11),
)  # fmt: skip
def test_hostile_text_costs_little(text: str) -> None:
    begin = time.process_time()
    read_fields(text)
    assert time.process_time() - begin < 2
