"""Patterns mean what Python's own matcher says they do."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.name_patterns import Patterns

_ATOMS = st.sampled_from(["a", "b", "1", ".", r"\.", r"\d", "[ab]", "[^a]", "[^2]", "[0-3]", r"\w"])
_PIECES = st.tuples(_ATOMS, st.sampled_from(["", "", "", "*", "+", "?", "*?"])).map("".join)
_PLAIN = st.lists(_PIECES, max_size=5).map("".join)
_GROUPS = st.lists(_PLAIN, min_size=1, max_size=3).map(lambda ways: "(" + "|".join(ways) + ")")
_EXPRESSIONS = st.lists(st.one_of(_PLAIN, _GROUPS), min_size=1, max_size=3).map("".join)
_TEXTS = st.text("ab12.", max_size=8).map(lambda text: f"x{text}")


@given(_EXPRESSIONS, _TEXTS, st.sampled_from(["", "$"]))
def test_an_expression_matches_what_python_matches(expression: str, text: str, end: str) -> None:
    # "x" stands at the front, so that no part of the path is one that is left out.
    whole = f"x({expression}){end}"
    prefixes = ("model.", "", "model.language_model.", "language_model.model.", "backbone.")
    expected = any(re.match(whole, prefix + text) for prefix in prefixes)
    assert Patterns.of([f"re:{whole}"]).match(text) == expected
    anywhere = f".*x({expression}){end}"
    assert Patterns.of([f"re:{anywhere}"]).match(text) == bool(re.match(anywhere, text))
