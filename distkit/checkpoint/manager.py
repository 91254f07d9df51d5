"""The checkpoints of one run: when they are complete, which is the newest, which are kept."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from distkit.checkpoint.agreement import on_all, on_main
from distkit.checkpoint.format import MANIFEST
from distkit.checkpoint.listing import CheckpointInfo, inspect_checkpoint, list_checkpoints
from distkit.checkpoint.load import CheckpointReader, check_sums
from distkit.checkpoint.replicated import own_share
from distkit.checkpoint.save import SaveJob, SaveRequest, Snapshot, take_snapshot, this_host
from distkit.config.schema import CheckpointConfig
from distkit.errors import CheckpointError
from distkit.state import OptimizerLayout, Shard
from distkit.world import World

__all__ = ["CheckpointManager"]

UNFINISHED = re.compile(r"\.tmp-step-\d+-(?P<host>.+)-(?P<pid>\d+)-\d+")
MOVED_ASIDE = re.compile(r"\.old-(?P<name>step-\d+)-\d+")
SURELY_DEAD_S = 24 * 3600.0

log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, finds, opens and removes the checkpoints of a folder. Methods are called by all ranks.

    Args:
        folder: Where they lie, one folder each; on storage that all ranks see.
        world: All ranks.
        config: ``keep``, ``keep_best``, ``best_metric``, ``best_mode`` and ``verify`` are used.
    """

    def __init__(self, folder: Path, world: World, config: CheckpointConfig) -> None:
        self.folder, self.world, self.config = folder, world, config
        self._opened: CheckpointReader | None = None

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        shards: Callable[[], Iterable[Shard]],
        layouts: Sequence[OptimizerLayout],
        trainer_state: dict[str, Any],
        aliases: dict[str, dict[str, str]],
        *,
        metrics: dict[str, float] | None = None,
        epoch: int = 0,
        strategy: str = "",
        rng: dict[str, torch.Tensor] | None = None,
    ) -> Path:
        """Write a checkpoint and remove those that are not to be kept.

        Args:
            step: Optimizer steps taken; an older checkpoint of the same step is replaced.
            shards: Gives this rank's share of the state.
            layouts: Of the optimizers, the same on all ranks.
            trainer_state: What the Trainer must remember; rank 0's is written.
            aliases: By model group: names of tied parameters and their canonical names.
            metrics: The last evaluation, reduced over ranks.
            epoch: Epoch.
            strategy: Its name.
            rng: This rank's generators, from :func:`distkit.checkpoint.collect_rng`.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: The same on all ranks: it can't be written. Older checkpoints are as before.
        """
        taken: list[Snapshot] = []
        on_all(self.world, lambda: taken.append(take_snapshot(shards(), rng)))
        sequence: int = on_main(self.world, self._next_sequence)
        request = SaveRequest(
            step, epoch, strategy, list(layouts), trainer_state, aliases, dict(metrics or {}), sequence
        )
        path = SaveJob(self.folder, self.world, request).run(taken[0])
        if self.world.is_main:
            self._retain()
        return path

    def _next_sequence(self) -> int:
        return 1 + max((info.sequence for info in list_checkpoints(self.folder)), default=0)

    # -- finding and opening ----------------------------------------------------------------------------------------

    def infos(self) -> list[CheckpointInfo]:
        """All checkpoints of the folder, the oldest first, damaged ones among them; looks from this rank alone."""
        return list_checkpoints(self.folder)

    def latest(self) -> Path | None:
        """The newest complete checkpoint; None if none was ever written here.

        Each candidate is checked as ``verify`` says, the newest first; damaged ones are passed over with a warning.

        Raises:
            CheckpointError: There are checkpoints, but all are damaged: to start afresh must be asked for.
        """
        return self._newest(self.folder)

    def open(self, path: str | Path) -> CheckpointReader:
        """Open a checkpoint and check it as ``verify`` says, each rank a share of the files.

        Args:
            path: The checkpoint's folder, or a folder of checkpoints, or a run's folder: then the newest in it.

        Raises:
            CheckpointError: The same on all ranks: it isn't there, or is damaged.
        """
        given = Path(path)
        holder = on_main(self.world, lambda: _holder(given))
        found = given if holder is None else self._newest(Path(holder))
        if found is None:
            raise CheckpointError(
                f"{given} holds no checkpoint", hint="give a folder like .../checkpoints/step-00000100"
            )
        reader, self._opened = self._opened, None
        return reader if reader is not None and reader.path == found else self._open(found)

    def _newest(self, folder: Path) -> Path | None:
        infos: list[tuple[str, str | None]] = on_main(
            self.world, lambda: [[i.path.name, i.problem] for i in reversed(list_checkpoints(folder))]
        )
        problems: list[str] = []
        for name, problem in infos:
            if problem is None:
                try:
                    self._opened = self._open(folder / name)
                    self._warn(problems)
                    return folder / name
                except CheckpointError as error:
                    problem = error.message
            problems.append(f"{name} is passed over: {problem}")
        if problems:
            raise CheckpointError(
                f"no checkpoint in {folder} is whole:" + "".join(f"\n  {line}" for line in problems),
                hint="start afresh: --set checkpoint.resume=none",
            )
        return None

    def _open(self, path: Path) -> CheckpointReader:
        opened: list[CheckpointReader] = []

        def work() -> None:
            reader = CheckpointReader(path, verify="fast")
            if self.config.verify == "full":
                files = [(name, entry.bytes) for name, entry in reader.manifest.files.items()]
                check_sums(path, reader.manifest, own_share(files, self.world.rank, self.world.size))
            opened.append(reader)

        on_all(self.world, work)
        return opened[0]

    def _warn(self, lines: list[str]) -> None:
        if self.world.is_main:
            for line in lines:
                log.warning("%s", line)

    # -- removing ---------------------------------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Remove what earlier runs left half-written, if its writer is surely dead; called at the start of a run.

        That is: a process of this host that is gone, or nothing written for a day. A checkpoint that was being replaced
        when its run died is put back.
        """
        if not self.world.is_main or not self.folder.is_dir():
            return
        try:
            for path in list(self.folder.iterdir()):
                self._clean_up_one(path)
        except OSError as error:
            log.warning("%s can't be cleaned up: %s", self.folder, error.strerror)

    def _clean_up_one(self, path: Path) -> None:
        if path.name.startswith(".del-"):
            _remove(path)
        elif match := UNFINISHED.fullmatch(path.name):
            if _surely_dead(match["host"], int(match["pid"]), path):
                _remove(path)
        elif match := MOVED_ASIDE.fullmatch(path.name):
            place = self.folder / match["name"]
            if not place.exists() and inspect_checkpoint(path).problem is None:
                path.rename(place)
            else:
                _remove(path)

    def _retain(self) -> None:
        """Rank 0: remove all but the newest ``keep`` and the best ``keep_best``; what is damaged is left alone."""
        if self.config.keep is None:
            return
        try:
            whole = [info for info in list_checkpoints(self.folder) if info.problem is None]
        except CheckpointError as error:
            log.warning("older checkpoints are not removed: %s", error.message)
            return
        kept = {info.path for info in whole[-self.config.keep :]} | {info.path for info in self._best(whole)}
        for info in whole:
            if info.path not in kept:
                _retire(info.path)

    def _best(self, infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
        """The best by ``best_metric``; of equal ones the older. Those without it, or with NaN, are never best."""
        metric, sign = self.config.best_metric, 1.0 if self.config.best_mode == "min" else -1.0
        measured = [i for i in infos if metric in i.metrics and not math.isnan(i.metrics[metric])]
        return sorted(measured, key=lambda info: sign * info.metrics[metric])[: self.config.keep_best or 0]


def _holder(path: Path) -> str | None:
    """The folder of checkpoints that a path stands for; None if it is a checkpoint itself, or nothing at all."""
    if (path / MANIFEST).exists():
        return None
    if (path / "checkpoints").is_dir():
        return str(path / "checkpoints")
    return str(path) if path.is_dir() and list_checkpoints(path) else None


def _retire(path: Path) -> None:
    """Rename first, so that a half-deleted checkpoint is never mistaken for one."""
    doomed = path.parent / f".del-{path.name}-{time.time_ns()}"
    try:
        path.rename(doomed)
    except OSError as error:
        log.warning("%s is not removed: %s", path, error.strerror)
        return
    _remove(doomed)


def _remove(path: Path) -> None:
    """A folder that can't be removed wastes space, which is said, but does no harm."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        if error.errno != errno.ENOENT:
            log.warning("%s is not removed: %s", path, error.strerror)


def _surely_dead(host: str, pid: int, path: Path) -> bool:
    if host == this_host() and not _alive(pid):
        return True
    times = [path.stat().st_mtime, *(file.stat().st_mtime for file in path.iterdir())]
    return time.time() - max(times) > SURELY_DEAD_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user: it is there
        return True
    return True
