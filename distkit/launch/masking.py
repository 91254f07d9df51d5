"""Secrets are masked in what is printed."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["mask_environment", "mask_text"]

MASK = "***"

_SECRET_WORDS = {"key", "apikey", "token", "secret", "password", "passwd", "credential", "credentials"}
_CREDENTIALS = re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)")
_SETTING = re.compile(r"([A-Za-z_][\w.]*)=([^\s\"',\]}]+)")


def mask_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables with the values of secret-looking names masked, and secrets inside other values too."""
    return {name: MASK if _is_secret(name) else mask_text(value) for name, value in variables.items()}


def mask_text(text: str) -> str:
    """Masks ``user:password`` in URLs and the values of ``KEY=VALUE`` settings with secret-looking names."""
    text = _CREDENTIALS.sub(f"{MASK}:{MASK}", text)
    return _SETTING.sub(lambda found: f"{found[1]}={MASK}" if _is_secret(found[1]) else found[0], text)


def _is_secret(name: str) -> bool:
    """Whole words only: WANDB_API_KEY is one, TOKENIZERS_PARALLELISM and max_tokens are not."""
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))
