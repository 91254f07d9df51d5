"""The report of a failure, the last thing on the screen: who failed, how, where its log is, and its own traceback."""

from __future__ import annotations

from collections.abc import Sequence

from distkit.launch.causes import likely_cause
from distkit.launch.failure import Failure, last_lines

__all__ = ["failure_report"]

_MOST_OTHERS = 8


def failure_report(root: Failure, others: Sequence[Failure], *, processes: int, next_step: str = "") -> str:
    """The text of the report.

    Args:
        root: The failure that came first.
        others: Failures that came after it, most often its consequences.
        processes: Number of processes in all.
        next_step: What happens now, for example a restart.

    Returns:
        Several lines; the last are the root's own traceback, if it left one.
    """
    what = f"rank {root.rank} of {processes} failed on {root.host}"
    if root.lost:
        what = root.host
    elif root.late:
        what = f"ranks wait for rank {root.rank} of {processes} on {root.host}"
    lines = ["", f"distkit-run: {what} ({root.description}){next_step}"]
    lines.append(f"  log: {root.log}")
    cause = likely_cause(root)
    if cause is not None:
        lines.append(f"  likely cause: {cause}")
    lines += [f"  then: rank {other.rank}, {_in_short(other)}" for other in others[:_MOST_OTHERS]]
    if len(others) > _MOST_OTHERS:
        lines.append(f"  then: {len(others) - _MOST_OTHERS} more ranks")
    if root.record is not None and root.record.traceback:
        lines += ["", root.record.traceback.rstrip("\n")]
    elif root.record is not None and root.record.message:
        lines += ["", f"{root.record.type}: {root.record.message}"]
    else:
        tail = root.tail or last_lines(root.log)
        what = "its Python stacks" if root.late and root.tail else "it left no traceback; the last lines of its log"
        lines += ["", f"{what}:", *(f"  | {line}" for line in tail)] if tail else []
    return "\n".join(lines) + "\n"


def _in_short(failure: Failure) -> str:
    if failure.record is None:
        return failure.description
    first = (failure.record.message.splitlines() or [""])[0]
    return f"{failure.record.type}: {first[:120]}" if first else failure.description
