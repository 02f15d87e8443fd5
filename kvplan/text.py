"""Untrusted names as safe text."""

from __future__ import annotations


def literal(text: object) -> str:
    """Text with control characters shown, so that no name can drive a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
