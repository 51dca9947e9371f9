"""Text of others, made safe for a terminal."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """A text with every character that a terminal would act on, or show in another order, written as an escape."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or unicodedata.category(one) == "Zs" else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    short = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}.get(character)
    code = ord(character)
    if short is not None:
        return short
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
