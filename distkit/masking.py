"""Secrets are masked in all that is printed or written: environments, command lines, settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["MASK", "is_secret", "mask_arguments", "mask_environment", "mask_text", "mask_values"]

MASK = "***"

_SECRET_WORDS = {"key", "apikey", "token", "secret", "password", "passwd", "credential", "credentials"}
_CREDENTIALS = re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)")
_SETTING = re.compile(r"([A-Za-z_][\w.-]*)=([^\s\"',\]}]+)")


def is_secret(name: str) -> bool:
    """Whether a variable, option or key with this name holds a secret.

    Whole words only: WANDB_API_KEY is one, TOKENIZERS_PARALLELISM and max_tokens are not.
    """
    return not _SECRET_WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def mask_text(text: str) -> str:
    """Masks ``user:password`` in URLs and the values of ``KEY=VALUE`` settings with secret-looking names."""
    text = _CREDENTIALS.sub(f"{MASK}:{MASK}", text)
    return _SETTING.sub(lambda found: f"{found[1]}={MASK}" if is_secret(found[1]) else found[0], text)


def mask_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables with the values of secret-looking names masked, and secrets inside other values too."""
    return {name: MASK if is_secret(name) else mask_text(value) for name, value in variables.items()}


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with secrets masked, also where option and value are two words (``--hub-token abc``)."""
    masked: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        option = before.startswith("-") and "=" not in before and is_secret(before)
        masked.append(MASK if option and not argument.startswith("-") else mask_text(argument))
    return masked


def mask_values(value: Any, name: str = "") -> Any:
    """Settings with secrets masked, at any depth.

    Args:
        value: A scalar, or mappings and lists of such.
        name: The key that it stands under.

    Returns:
        A copy; texts under secret-looking keys are :data:`MASK`.
    """
    if isinstance(value, Mapping):
        return {key: mask_values(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mask_values(inner, name) for inner in value]
    if isinstance(value, str) and value:
        return MASK if is_secret(name) else mask_text(value)
    return value
