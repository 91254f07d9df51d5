"""Play a round: train, disturb, go on, and compare with the training that nobody disturbed."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from typer.testing import CliRunner

from distkit.checkpoint import CheckpointReader, list_checkpoints
from distkit.checkpoint.compare import compare_checkpoints
from distkit.checkpoint.store import UNFINISHED
from distkit.checkpoint_cli import checkpoint_app
from tests.chaos.damage import damage, leave_folders
from tests.chaos.disks import remount, small_disk, unlock_folder
from tests.chaos.rounds import DROPOUT, Round
from tests.chaos.running import Run, command_line, run_line, state
from tests.chaos.strikes import Strike, strike
from tests.chaos.train import STEPS

__all__ = ["Outcome", "References", "play"]

WITHIN = 2e-5
"""Largest difference of a parameter or moment where strategy or world size changed: other orders of summation, through
STEPS steps of Adam with a rate of 1e-2."""

_one_at_a_time = threading.Lock()


@dataclass
class Outcome:
    """What came of a round.

    Args:
        plan: The round.
        lost: Checkpoints or steps that are gone and shouldn't be.
        wrong: Checkpoints or final states that aren't what they should be.
        other: Anything else that isn't as documented: exit status, message, left-overs.
        struck: Whether the run was disturbed before it ended.
        inside: Whether that was inside a save.
        seconds: How long it took.
        folder: Where its files are, if they were kept.
    """

    plan: Round
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    struck: bool = False
    inside: bool = False
    seconds: float = 0.0
    folder: str = ""

    @property
    def problems(self) -> list[str]:
        """All of them, in words."""
        named = (("lost", self.lost), ("wrong", self.wrong), ("", self.other))
        return [f"{name}: {text}" if name else text for name, texts in named for text in texts]


class References:
    """The undisturbed runs, each trained once.

    Args:
        folder: Where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, strategy: str, nproc: int, dropout: float) -> Path:
        """The run's folder, with one checkpoint: that of the end."""
        name = f"{strategy}-{nproc}-{dropout:g}"
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            run_dir = self.folder / name
            if not run_dir.exists():
                run = Run(run_line(run_dir, strategy, nproc, dropout), run_dir, self.folder / f"{name}.txt")
                try:
                    if run.wait() != 0:
                        raise RuntimeError(f"the undisturbed run {name} failed:\n{run.text[-3000:]}")
                finally:
                    run.close()
            return run_dir


def play(plan: Round, references: References, folder: Path, *, keep: bool = False) -> Outcome:
    """Play a round in a folder of its own.

    Args:
        plan: The round.
        references: Undisturbed runs.
        folder: Must not exist; it is removed again unless something is wrong.
        keep: Keep it anyway.
    """
    began = time.monotonic()
    outcome = Outcome(plan)
    game = _Game(plan, references, folder, outcome)
    with ExitStack() as stack:
        stack.callback(game.close)
        try:
            game.play(stack)
        except Exception:  # the other rounds go on
            outcome.other.append(traceback.format_exc())
        if outcome.problems or keep:
            outcome.folder = str(folder)
            game.save_files()
    if not outcome.folder:
        shutil.rmtree(folder, ignore_errors=True)
    outcome.seconds = time.monotonic() - began
    return outcome


class _Game:
    """One round while it is played."""

    def __init__(self, plan: Round, references: References, folder: Path, outcome: Outcome) -> None:
        self.plan, self.references, self.folder, self.outcome = plan, references, folder, outcome
        disk = folder / "disk"
        whole_run_on_it = plan.kind in ("small disk", "disk filled, freed")
        self.run_dir = disk / "run" if whole_run_on_it else folder / "run"
        self.checkpoints = self.run_dir / "checkpoints"
        # A disk with open files can't become read-only, and the logs are open: so only the checkpoints are on it.
        read_only_disk = plan.kind == "read-only" and plan.lock == "disk"
        self.disk = disk if whole_run_on_it else self.checkpoints if read_only_disk else None
        self.witness = folder / "executed"
        self.runs: list[Run] = []
        self.foreign: Path | None = None

    def play(self, stack: ExitStack) -> None:
        plan, outcome = self.plan, self.outcome
        reference = self.references.get(*self._reference())
        size = sum(file.stat().st_size for file in (reference / "checkpoints").glob("step-*/*"))
        self.folder.mkdir(parents=True)
        if self.disk is not None:
            room = plan.room if plan.kind == "small disk" else plan.keep + 3
            stack.enter_context(small_disk(self.disk, int(room * size) + (1 << 20)))
        run = self._start(plan.strategy, plan.nproc, "--max-restarts", str(int(plan.restart)))
        struck = strike(run, plan, self.disk)
        status = run.wait()
        outcome.struck, outcome.inside = struck.done, struck.inside
        self._check_processes(run)
        if struck.done:
            self._check_end(run, struck, status)
        elif status != 0:
            outcome.other.append(f"the run ended with status {status} before it was disturbed")
        struck.undo()
        if plan.kind == "small disk":
            assert self.disk is not None
            remount(self.disk, f"size={(plan.keep + 3) * size}")
        newest = self._check_folder(run, struck)
        if not (plan.restart and status == 0):
            self._go_on(newest, run)
        self._check_result(reference)

    def _reference(self) -> tuple[str, int, float]:
        """Without dropout every configuration trains the same, up to rounding: one reference is enough."""
        return ("single", 1, 0.0) if self.plan.changed else (self.plan.strategy, self.plan.nproc, DROPOUT)

    def _start(self, strategy: str, nproc: int, *words: str) -> Run:
        plan = self.plan
        settings = {"every_steps": plan.every, "keep": plan.keep, "background": str(plan.background).lower()}
        sets = [word for key, value in settings.items() for word in ("--set", f"checkpoint.{key}={value}")]
        line = run_line(self.run_dir, strategy, nproc, plan.dropout, *sets, *words)
        run = Run(line, self.run_dir, self.folder / f"screen-{len(self.runs)}.txt")
        self.runs.append(run)
        return run

    # -- after the disturbance --------------------------------------------------------------------------------------

    def _check_processes(self, run: Run) -> None:
        for pid in run.left():
            self.outcome.other.append(f"process {pid} is left: {command_line(pid)}")

    def _check_end(self, run: Run, struck: Strike, status: int) -> None:
        text = run.text
        too_late = self.plan.kind == "TERM" and status == 0 and run.last_step() == STEPS  # no step was left to end at
        if status not in struck.statuses and not too_late:
            self.outcome.other.append(f"exit status {status}, documented is {struck.statuses}: {text[-1500:]}")
        if status == 1 and struck.causes:
            lines = [line for line in text.splitlines() if str(self.run_dir) in line]
            if not any(cause in line for cause in struck.causes for line in lines):
                self.outcome.other.append(f"no line names file and cause ({struck.causes}): {text[-1500:]}")

    def _check_folder(self, run: Run, struck: Strike) -> str | None:
        """Nothing that was whole is lost or damaged.

        Returns:
            Name of the newest checkpoint; None if there is none.
        """
        outcome, plan = self.outcome, self.plan
        infos = list_checkpoints(self.checkpoints)
        for line in self._verify():
            outcome.wrong.append(f"after {plan.kind}: {line}")
        newest = infos[-1].step if infos else 0
        before = max((int(name[5:]) for name in struck.whole), default=0)
        if newest < before:
            outcome.lost.append(f"step {before} was saved before {plan.kind}, now the newest is {newest}")
        last = run.last_step()
        behind = plan.every * (2 if plan.background else 1)
        if struck.causes:  # saves that failed were no saves; those before are counted above
            behind = STEPS
        if last - newest > behind:
            outcome.lost.append(f"{last} steps were taken, the newest checkpoint is of step {newest}")
        term = re.search(r"SIGTERM at step (\d+)", run.text)
        if term and newest != int(term[1]):
            outcome.lost.append(f"SIGTERM at step {term[1]}, but the newest checkpoint is of step {newest}")
        return infos[-1].path.name if infos else None

    def _verify(self) -> list[str]:
        """What `distkit checkpoint verify` calls damaged."""
        if not list(self.checkpoints.glob("step-*")):
            return []
        with _one_at_a_time:  # the runner takes over standard output
            result = CliRunner().invoke(checkpoint_app, ["verify", str(self.run_dir)])
        found = [line for line in result.output.splitlines() if "DAMAGED" in line]
        if result.exit_code != (1 if found else 0):
            self.outcome.other.append(f"verify ended with status {result.exit_code}: {result.output}")
        return found

    # -- going on ---------------------------------------------------------------------------------------------------

    def _go_on(self, newest: str | None, before: Run) -> None:
        plan, outcome = self.plan, self.outcome
        damaged: Path | None = None
        if newest is not None and plan.kind.startswith("damaged"):
            damaged = damage(self.checkpoints / newest, plan, self.witness)
            found = self._verify()
            if len(found) != 1 or not found[0].startswith(newest) or damaged.name not in found[0]:
                outcome.wrong.append(f"{damaged} was damaged ({plan.damage}), verify says {found}")
            left = [info.path.name for info in list_checkpoints(self.checkpoints) if info.path.name != newest]
            newest = left[-1] if left else None
        elif newest is not None and plan.kind == "left-over folders":
            _, self.foreign = leave_folders(self.checkpoints, before.process.pid)
        run = self._start(plan.next_strategy, plan.next_nproc)
        status = run.wait()
        self._check_processes(run)
        if status != 0:
            outcome.other.append(f"the run that goes on ended with status {status}: {run.text[-1500:]}")
            return
        resumed = re.search(r"^resumed from (step-\d+): step (\d+)", run.text, re.MULTILINE)
        where = resumed[1] if resumed else None
        if where != newest:
            outcome.lost.append(f"went on from {where}, the newest whole checkpoint is {newest}")
        if damaged is not None and "is passed over" not in run.everything():
            outcome.other.append("nothing says that a damaged checkpoint is passed over")

    # -- at the end -------------------------------------------------------------------------------------------------

    def _check_result(self, reference: Path) -> None:
        outcome = self.outcome
        for line in self._verify():
            outcome.wrong.append(f"at the end: {line}")
        if self.witness.exists():
            outcome.wrong.append("a pickle in a checkpoint was executed")
        if self.foreign is not None:
            if not self.foreign.is_dir():
                outcome.other.append("the unfinished folder of another host was removed")
            shutil.rmtree(self.foreign, ignore_errors=True)
        for path in self.checkpoints.glob(".*"):
            match = UNFINISHED.fullmatch(path.name)
            if match is None or state(int(match["pid"])) == "":  # else the number has been given to another process
                outcome.other.append(f"{path.name} is left")
        final = [info for info in list_checkpoints(self.checkpoints) if info.step == STEPS]
        if not final:
            outcome.lost.append(f"there is no checkpoint of the last step, {STEPS}")
            return
        self._compare(final[0].path, reference / "checkpoints" / final[0].path.name)
        self._compare_metrics(reference)

    def _compare(self, path: Path, expected: Path) -> None:
        """Parameters, buffers, optimizer states, random numbers; of the Trainer's state the schedulers and the position.

        Not the epoch: a periodic checkpoint of the last step is of the epoch that is about to end, the one at the end is not.
        """
        wrong, within = self.outcome.wrong, WITHIN if self.plan.changed else 0.0
        ours, theirs = CheckpointReader(path), CheckpointReader(expected)
        for d in compare_checkpoints(ours, theirs):
            if d.what != "equal" and not (d.what == "values" and d.largest <= within):
                wrong.append(f"{d.group} {d.name} {d.kind} differs in {d.what}, {d.largest:g}")
        states = [reader.trainer_state() for reader in (ours, theirs)]
        for key in ("step", "samples", "optimizer_steps", "schedulers", "loaders"):
            if states[0][key] != states[1][key]:
                wrong.append(f"{key} is {states[0][key]}, undisturbed {states[1][key]}")
        for rank in range(0 if self.plan.changed else self.plan.nproc):
            rngs = [reader.rng(rank) for reader in (ours, theirs)]
            if rngs[0].keys() != rngs[1].keys() or any(not bool((rngs[0][k] == rngs[1][k]).all()) for k in rngs[0]):
                wrong.append(f"the random number generators of rank {rank} differ")

    def _compare_metrics(self, reference: Path) -> None:
        """Each step once in metrics.jsonl, with the loss of the undisturbed run."""
        found, expected = _losses(self.run_dir), _losses(reference)
        if self.runs[0].lost_metrics:  # a full disk doesn't end a run because of them; what is there must be right
            expected = [line for line in expected if line[0] in dict(found)]
        elif [step for step, _ in found] != [*range(1, STEPS + 1)]:
            self.outcome.wrong.append(f"metrics.jsonl has the steps {[step for step, _ in found]}")
        if not self.plan.changed and found != expected:
            steps = [a for a, b in zip(found, expected, strict=False) if a != b]
            self.outcome.wrong.append(f"other losses than in the undisturbed run at steps {steps}")

    def save_files(self) -> None:
        """Take what lies on a disk that is about to be unmounted."""
        if self.disk is not None and self.disk.exists():
            shutil.copytree(self.disk, self.folder / "disk-kept", symlinks=True, dirs_exist_ok=True)

    def close(self) -> None:
        """End all processes, unlock what is locked."""
        for run in self.runs:
            run.close()
        if self.plan.kind == "read-only" and self.run_dir.exists():
            if self.disk is not None and os.path.ismount(self.disk):
                remount(self.disk, "rw")
            unlock_folder(self.run_dir)


def _losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]
