"""The processes of a run: who this one is, where it computes, and how they agree.

Who this process is can be told without torch; :class:`World` is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distkit.world.environment import Environment, detect_environment

if TYPE_CHECKING:
    from distkit.world.world import Axis, World

__all__ = ["Axis", "Environment", "World", "detect_environment"]


def __getattr__(name: str) -> Any:
    if name not in ("Axis", "World"):
        raise AttributeError(f"module 'distkit.world' has no attribute {name!r}")
    from distkit.world import world

    return getattr(world, name)
