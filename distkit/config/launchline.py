"""What `distkit-run` hands to the processes that it starts: one environment variable with JSON in it.

The variable is written by :mod:`distkit.launch` and read by :class:`distkit.Trainer`; a script that was not launched
by `distkit-run` simply has none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from distkit.errors import LaunchError

__all__ = ["VARIABLE", "LaunchSettings"]

VARIABLE = "DISTKIT_SETTINGS"


@dataclass(frozen=True)
class LaunchSettings:
    """The settings that came with the launch line.

    Args:
        config: Path of the config file given with ``-c``, absolute.
        overrides: ``KEY=VALUE`` texts in the order in which they were given (``-s`` and ``--run-dir`` are among them).
        launcher: Which launcher started the processes.
        preview: What `distkit plan` wants to be shown instead of training; empty for a run.
    """

    config: str | None = None
    overrides: list[str] = field(default_factory=list)
    launcher: str | None = None
    preview: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text to put into :data:`VARIABLE`."""
        return json.dumps({k: v for k, v in asdict(self).items() if v}, separators=(",", ":"))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> LaunchSettings:
        """Read them back; empty settings where the variable isn't set.

        Raises:
            LaunchError: The variable holds something else.
        """
        text = (os.environ if environ is None else environ).get(VARIABLE)
        if not text:
            return cls()
        try:
            data = json.loads(text)
            return cls(
                config=data.get("config"),
                overrides=[str(x) for x in data.get("overrides", [])],
                launcher=data.get("launcher"),
                preview=dict(data.get("preview", {})),
            )
        except (ValueError, AttributeError, TypeError) as error:
            raise LaunchError(
                f"the environment variable {VARIABLE} holds {text[:200]!r}, which distkit-run didn't write ({error})",
                hint=f"unset {VARIABLE}",
            ) from error
