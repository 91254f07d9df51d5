"""Names that are nearest to a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["nearest", "nearest_key"]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that looks most like ``word``, or None when none does."""
    found = get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def nearest_key(dotted: str, known: Iterable[str]) -> str | None:
    """The known dotted key that is nearest: by its whole, else by its last part (``clip_nrom`` -> ``optim.clip_norm``)."""
    known = list(known)
    whole = nearest(dotted, known)
    if whole is not None and whole.rsplit(".", 1)[0] == dotted.rsplit(".", 1)[0]:
        return whole
    last = {name.rsplit(".", 1)[-1]: name for name in known}
    found = get_close_matches(dotted.rsplit(".", 1)[-1].lower(), list(last), n=1, cutoff=0.6)
    return last[found[0]] if found else whole
