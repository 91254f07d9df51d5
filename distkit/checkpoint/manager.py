"""The checkpoints of one run: when they are complete, which is the newest, which are kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from distkit.checkpoint.agreement import on_all, on_main
from distkit.checkpoint.background import BackgroundSave
from distkit.checkpoint.format import MANIFEST
from distkit.checkpoint.listing import CheckpointInfo, list_checkpoints
from distkit.checkpoint.load import CheckpointReader, check_sums
from distkit.checkpoint.paths import to_path
from distkit.checkpoint.replicated import own_share
from distkit.checkpoint.save import SaveJob, SaveRequest
from distkit.checkpoint.snapshot import HostCopies, Snapshot, take_snapshot
from distkit.checkpoint.store import open_store
from distkit.config.schema import CheckpointConfig, TimeoutConfig
from distkit.errors import CheckpointError
from distkit.state import OptimizerLayout, Shard
from distkit.world import World

__all__ = ["CheckpointManager"]


log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, finds, opens and removes the checkpoints of a folder. Methods are called by all ranks.

    Args:
        folder: Where they lie, one folder each; on storage that all ranks see.
        world: All ranks.
        config: ``keep``, ``keep_best``, ``best_metric``, ``best_mode`` and ``verify`` are used.
        timeouts: ``save_s`` and ``grace_s`` are used, for saves in the background.
    """

    def __init__(
        self, folder: Path, world: World, config: CheckpointConfig, timeouts: TimeoutConfig | None = None
    ) -> None:
        self.folder, self.world, self.config = folder, world, config
        self.store = open_store(folder)
        self._timeouts = timeouts or TimeoutConfig()
        self._opened: CheckpointReader | None = None
        self.background = BackgroundSave(self._timeouts.grace_s)
        self._copies = HostCopies()
        self._aside: World | None = None

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
        wait: bool = True,
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
            wait: Return when it is on the disk. False copies the state to the host and writes it in a thread, which
                talks to the other ranks' threads over a process group of its own; ``background`` tells how it ended.
                The save before must be over.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: The same on all ranks: it can't be written. Older checkpoints are as before.
        """
        request = SaveRequest(step, epoch, strategy, list(layouts), trainer_state, aliases, dict(metrics or {}))
        job = SaveJob(self.store, request)
        taken: list[Snapshot] = []

        def prepare() -> str:
            taken.append(take_snapshot(shards(), rng, None if wait else self._copies))
            return job.encode(copy=not wait) if self.world.is_main else ""

        name: str = on_all(self.world, prepare)[0]
        if wait:
            return self._write(name, self.world, job, taken[0])
        if self._aside is None:
            self._aside = self.world.aside(self._timeouts.save_s)
        aside = self._aside
        self.background.start(step, lambda: self._write(name, aside, job, taken[0]))
        return self.folder / name

    def _write(self, name: str, world: World, job: SaveJob, snapshot: Snapshot) -> Path:
        path = job.run(name, world, snapshot)
        if world.is_main:
            self._retain()
        return path

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
        given = to_path(path)
        holder = on_main(self.world, lambda: _holder(given))
        found = given if holder is None else self._newest(to_path(holder))
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
        if self.world.is_main:
            self.store.clean_up()

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
                self.store.retire(info.path.name)

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
