"""metrics.jsonl: one JSON object a step, written at once, and no step twice."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["MetricsFile"]


class MetricsFile:
    """One JSON object a line.

    What is logged at one step stands in one line: values that come later for the step of the last line are merged
    into it, in place. NaN and infinities are ``null``, because JSON has no others, and their names are listed under
    ``non_finite``.

    Args:
        path: The file. What it holds already is kept, a half-written last line aside.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._begin = self._end = 0
        self._last: dict[str, Any] | None = None

    def write(self, step: int, values: dict[str, Any], *, time: float) -> None:
        """Log values at a step.

        Args:
            step: Optimizer steps done. If it is less than the last line's, the lines after it belong to a run that
                was given up.
            values: Plain values.
            time: Seconds since 1970.

        Raises:
            OSError: The line can't be written; the lines before it are as they were.
        """
        if self._file is None or (self._last is not None and self._last["step"] > step):
            self.truncate_after(step)
        record = _record(step, values, time)
        begin = self._end
        if self._last is not None and self._last["step"] == step:
            record, begin = _merge(self._last, record), self._begin
        line = _encode(record)
        assert self._file is not None
        try:
            _write_all(self._file, line, begin)
            if begin + len(line) < self._end:
                os.ftruncate(self._file, begin + len(line))
        except OSError:
            self._restore(self._file, begin)
            raise
        self._last, self._begin, self._end = record, begin, begin + len(line)

    def truncate_after(self, step: int) -> int:
        """Move lines that a resumed run is going to write again to ``metrics.lost.jsonl``, and open the file.

        A run that was killed has written lines after its last checkpoint. Half-written lines are moved too.

        Args:
            step: The last step that counts.

        Returns:
            How many lines were moved.

        Raises:
            OSError: The file can't be read or written.
        """
        self.close()
        lost = 0
        self._last, self._begin, self._end = None, 0, 0
        if self.path.exists() and any(not _counts(line, step) for line in _lines(self.path)):
            lost = self._move_lines(step)
        for line in _lines(self.path) if self.path.exists() else ():
            self._begin, self._end = self._end, self._end + len(line)
            last = line
        if self._end:
            self._last = json.loads(last)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        return lost

    def close(self) -> None:
        """Close the file; writing again opens it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _restore(self, file: int, begin: int) -> None:
        """Undo a half-written line: a full disk still takes what overwrites its own bytes."""
        if begin < self._end:
            _write_all(file, _encode(self._last), begin)
        os.ftruncate(file, self._end)

    def _move_lines(self, step: int) -> int:
        """The kept lines replace the file at once, after the others are safe."""
        partial = self.path.with_suffix(".partial")
        moved = 0
        with partial.open("wb") as kept, self.path.with_suffix(".lost.jsonl").open("ab") as lost:
            for line in _lines(self.path):
                if _counts(line, step):
                    kept.write(line)
                else:
                    lost.write(line.rstrip(b"\n") + b"\n")
                    moved += 1
            lost.flush()
            os.fsync(lost.fileno())
            kept.flush()
            os.fsync(kept.fileno())
        partial.replace(self.path)
        return moved


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _counts(line: bytes, step: int) -> bool:
    """Whether a line is whole and not after ``step``."""
    if not line.endswith(b"\n"):
        return False
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= step


def _record(step: int, values: dict[str, Any], time: float) -> dict[str, Any]:
    record: dict[str, Any] = {"time": round(time, 3), "step": step}
    odd: list[str] = []
    for name, value in values.items():
        record[name] = _finite(value)
        if record[name] != value:
            odd.append(name)
    if odd:
        record["non_finite"] = odd
    return record


def _encode(record: dict[str, Any] | None) -> bytes:
    return json.dumps(record, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    odd = [name for name in old.get("non_finite", []) if name not in new] + new.get("non_finite", [])
    merged = {name: value for name, value in {**old, **new}.items() if name != "non_finite"}
    return {**merged, "non_finite": odd} if odd else merged


def _write_all(file: int, data: bytes, offset: int) -> None:
    """One call as a rule, so that a kill leaves a whole line; a nearly full disk may take a part only."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
