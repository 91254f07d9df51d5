"""Work that succeeds on all ranks or fails on all, with the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distkit.errors import CheckpointError, DistkitError
from distkit.world import World

__all__ = ["on_all", "on_main"]


def on_all(world: World, work: Callable[[], Any]) -> list[Any]:
    """Run on every rank.

    Args:
        world: All ranks call this.
        work: Gives a JSON-able value.

    Returns:
        The values of all ranks.

    Raises:
        CheckpointError: On every rank if it failed on any; names the ranks and the first cause.
    """
    outcome, cause = _attempt(work)
    outcomes = world.all_gather_objects(outcome)
    failed = [rank for rank, other in enumerate(outcomes) if "problem" in other]
    if not failed:
        return [other["value"] for other in outcomes]
    first = outcomes[failed[0]]
    where = f"rank {failed[0]}: " if world.size > 1 else ""
    others = f" (and on rank{'s' if len(failed) > 2 else ''} {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
    raise CheckpointError(f"{where}{first['problem']}{others}", hint=first["hint"]) from cause


def on_main(world: World, work: Callable[[], Any]) -> Any:
    """Run on rank 0 only.

    Returns:
        Rank 0's JSON-able value, on every rank.

    Raises:
        CheckpointError: On every rank if it failed there.
    """
    outcome, cause = _attempt(work) if world.is_main else (None, None)
    outcome = world.broadcast_object(outcome)
    if "problem" in outcome:
        where = "rank 0: " if world.size > 1 else ""
        raise CheckpointError(f"{where}{outcome['problem']}", hint=outcome["hint"]) from cause
    return outcome["value"]


def _attempt(work: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
    """Every exception is told to the other ranks, who would otherwise wait for this one until a timeout."""
    try:
        return {"value": work()}, None
    except DistkitError as error:
        return {"problem": error.message, "hint": error.hint}, error
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return {"problem": f"{name}{error.strerror or error}", "hint": None}, error
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}", "hint": None}, error
