"""What a few real steps need: bytes by kind, collectives, bytes on the wire. For ``distkit plan --check``."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.callbacks import Callback
from distkit.memory import count_state
from distkit.traffic import TrafficCounter, socket_bytes

if TYPE_CHECKING:
    import torch

    from distkit.trainer import Trainer

__all__ = ["MEASURED_STEPS", "Measure", "around"]

_COUNTED, _PEAK = 2, 3
"""Steps, from 1 on. The first one is no example: engines set themselves up in it."""

MEASURED_STEPS = _PEAK
"""So many steps a script must be able to take."""


class Measure(Callback):
    """Measures the first steps of a run, writes a file for each rank, and ends the process with status 0.

    Args:
        folder: Gets ``measured-RANK.json``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = ExitStack()
        self._traffic = TrafficCounter()
        self._found: dict[str, Any] = {"gradients": 0}
        self._gradients: list[weakref.ref[torch.UntypedStorage]] = []

    def on_start(self, trainer: Trainer) -> None:
        """See :class:`Callback`."""

        def look(*_: Any, **__: Any) -> None:
            if trainer.global_step + 1 == _COUNTED:
                now = count_state(trainer.strategy).gradients
                self._found["gradients"] = max(self._found["gradients"], now)
                held = trainer.strategy.state_tensors().get("gradients", [])
                self._gradients = [weakref.ref(_storage(gradient)) for gradient in held]

        around(trainer.strategy, "backward", after=look)
        around(trainer.strategy, "optimizer_step", before=look)

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        """See :class:`Callback`."""
        if step + 1 == _COUNTED:
            self._found["sockets"] = socket_bytes()
            self._open.enter_context(self._traffic)
        elif step == _COUNTED:
            self._open.close()
            self._take_counts(trainer)
            self._open.enter_context(self._peak(trainer.device))
        elif step == _PEAK:
            self._open.close()
            self._write(trainer)
            trainer.close()
            sys.exit(0)

    def _take_counts(self, trainer: Trainer) -> None:
        before, now = self._found["sockets"], socket_bytes()
        self._found["sockets"] = None if before is None or now is None else now - before
        state = count_state(trainer.strategy)
        self._found |= {"parameters": state.parameters, "optimizer": state.optimizer, "buffers": state.buffers}
        self._found["sent"] = self._traffic.sent
        self._found["collectives"] = [
            {"what": call.what, "message": call.message, "ranks": call.ranks, "count": count}
            for call, count in sorted(self._traffic.calls.items(), key=lambda item: -item[0].message * item[1])
        ]
        self._found["rest"] = state.total

    def _kept_gradients(self, trainer: Trainer) -> int:
        """Bytes of gradients' memory of an earlier step that nobody sees between two steps, and an engine keeps: DDP's buckets."""
        gc.collect()  # what only lies around isn't kept
        seen = {_storage(t)._cdata for kind in trainer.strategy.state_tensors().values() for t in kind}
        kept = {storage._cdata: storage for one in self._gradients if (storage := one()) is not None}
        return sum(storage.nbytes() for key, storage in kept.items() if key not in seen)

    def _write(self, trainer: Trainer) -> None:
        world = trainer.world
        self._found["rest"] += self._kept_gradients(trainer)
        self._found |= {
            "processes": world.size,
            "per_node": world.environment.local_size,
            "data": world.data.size,
            "tensor": world.tensor.size,
            "device": trainer.device.type,
            "backend": world.backend,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"measured-{world.rank}.json"
        path.write_text(json.dumps(self._found), encoding="utf-8")

    @contextmanager
    def _peak(self, device: torch.device) -> Iterator[None]:
        """Bytes that a step needs at most above what is there before it."""
        if device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            yield
            self._found["above_rest"] = torch.cuda.max_memory_allocated(device) - before
            return
        with _cpu_allocations() as found:
            yield
        self._found["above_rest"] = found()


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Of this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


@contextmanager
def _cpu_allocations() -> Iterator[Callable[[], int]]:
    """The highest sum of torch's allocations and releases on the CPU, of all threads."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        yield lambda: _highest(recorded)


def _highest(recorded: Any) -> int:
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: int(event.start_ns())):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


def around(
    target: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> None:
    """Look in before or after each call of a method of this object.

    Args:
        target: The object.
        name: Of its method.
        before: Is given the method's arguments.
        after: Too.
    """
    method = getattr(target, name)

    def looked_at(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = method(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    setattr(target, name, looked_at)
