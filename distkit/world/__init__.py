"""The processes of a run: who this one is, where it computes, and how they agree."""

from distkit.world.environment import Environment, detect_environment
from distkit.world.world import Axis, World

__all__ = ["Axis", "Environment", "World", "detect_environment"]
