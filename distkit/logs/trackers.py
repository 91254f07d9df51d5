"""TensorBoard, W&B and MLflow, through accelerate's trackers. Imported only when ``log.to`` asks for one."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distkit.errors import ConfigError

__all__ = ["TRACKERS", "Tracker", "check_trackers", "hyper_parameters"]

TRACKERS = {"tensorboard": "TensorBoardTracker", "wandb": "WandBTracker", "mlflow": "MLflowTracker"}
"""Name in ``log.to`` and in pip: the class in accelerate.tracking."""

_IDS = "trackers.json"
"""In the run's folder: which run on the server this one is, so that a resumed run goes on there."""

_LATER = {
    "tensorboard": "pip install tensorboard",
    "wandb": "wandb login   or export WANDB_MODE=offline",
    "mlflow": "export MLFLOW_TRACKING_URI=...",
}


def check_trackers(names: Iterable[str]) -> None:
    """Whether the packages are there; nothing is imported to find out.

    Raises:
        ConfigError: One isn't; the hint is the line that installs it.
    """
    for name in names:
        if name in TRACKERS and find_spec(name) is None:
            raise ConfigError(
                f"log.to has {name!r}, but the package {name} is not installed", hint=f"pip install {name}"
            )


def hyper_parameters(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as trackers take them: dotted names, and numbers or texts.

    Args:
        flat: Settings by dotted name, secrets masked already.
    """
    known = (bool, int, float, str)
    return {name: value if isinstance(value, known) else json.dumps(value) for name, value in flat.items()}


class Tracker:
    """One of accelerate's trackers, in this process alone. Make it on rank 0 only.

    Args:
        name: A key of :data:`TRACKERS`.
        run_dir: The run's folder.
        project: Project (W&B) or experiment (MLflow), where the environment names none.
        parameters: Hyper-parameters, see :func:`hyper_parameters`.
        step: Steps done; TensorBoard hides what a lost part of the run wrote after it.

    Raises:
        ConfigError: It can't be started.
    """

    def __init__(self, name: str, run_dir: Path, *, project: str, parameters: Mapping[str, Any], step: int) -> None:
        self.name = name
        with _accelerate_alone():
            try:
                self._tracker = _start(name, run_dir, project, step)
                self._tracker.store_init_configuration(_new_parameters(self._tracker, parameters))
            except Exception as error:  # whatever a server, a login or a disk may say
                raise ConfigError(
                    f"log.to has {name!r}, but it can't be started: {type(error).__name__}: {error}", hint=_LATER[name]
                ) from error

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the numbers among the values; the members of a list under names of their own."""
        numbers: dict[str, float] = {}
        for name, value in values.items():
            members = {f"{name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {name: value}
            numbers.update({key: float(v) for key, v in members.items() if isinstance(v, int | float)})
        with _accelerate_alone():
            self._tracker.log(numbers, step=step)

    def close(self) -> None:
        """Send what is still waiting, and end the run on the server."""
        with _accelerate_alone():
            self._tracker.finish()


def _start(name: str, run_dir: Path, project: str, step: int) -> Any:
    from accelerate import tracking

    kind = getattr(tracking, TRACKERS[name])
    ids = _read_ids(run_dir)
    if name == "tensorboard":
        tracker = kind("tensorboard", run_dir, purge_step=step + 1 if step else None)
    elif name == "wandb":
        own = ids.setdefault("wandb", uuid.uuid4().hex[:12])
        project = os.environ.get("WANDB_PROJECT", project)
        tracker = kind(project, name=run_dir.name, dir=str(run_dir), id=own, resume="allow")
    else:
        tracker = kind(project, run_id=ids.get("mlflow"), run_name=run_dir.name)
    if hasattr(tracker, "start"):  # accelerate below 1.1 starts in the constructor
        tracker.start()
    if name == "mlflow":
        ids["mlflow"] = tracker.active_run.info.run_id
    _write_ids(run_dir, ids)
    return tracker


def _new_parameters(tracker: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """MLflow refuses to change a parameter of a run; a resumed run may well have another max_steps."""
    known = tracker.active_run.data.params if tracker.name == "mlflow" else {}
    return {name: value for name, value in parameters.items() if name not in known}


def _read_ids(run_dir: Path) -> dict[str, str]:
    try:
        found = json.loads((run_dir / _IDS).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _write_ids(run_dir: Path, ids: Mapping[str, str]) -> None:
    if ids:
        (run_dir / _IDS).write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _accelerate_alone() -> Iterator[None]:
    """Show accelerate a world of one for the time of a call.

    Its trackers ask a PartialState whether this is the main process, and their logger refuses to work before there is
    one (accelerate 1.15: tracking.py, on_main_process; logging.py, MultiProcessAdapter.log). But making one joins or
    creates process groups, writes RANK and so on, and sets the device (state.py, PartialState.__init__). So the shared state is filled by hand and emptied again, unless the script or a
    strategy has made a real one.
    """
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = PartialState._shared_state
    if state:
        yield
        return
    state.update(
        _cpu=True,
        backend=None,
        device=torch.device("cpu"),
        debug=False,
        distributed_type=DistributedType.NO,
        fork_launched=False,
        num_processes=1,
        process_index=0,
        local_process_index=0,
    )
    try:
        yield
    finally:
        state.clear()
