"""Runs of `distkit-run` on emulated hosts, and what they leave in their folder."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.emulated import ROOT, EmulatedCluster

TRAINING = str(Path(__file__).with_name("training.py"))
HOSTS = ("--hosts", "host0:2,host1:2")
CHECKPOINTS = ("--set", "checkpoint.every_steps=2")
SETTINGS = ("batch.per=global", "log.every_steps=1", "log.to=[jsonl]", "checkpoint.at_end=false", "device=cpu")
STEPS = 16


class Run:
    """A run's folder, and the commands that belong to it.

    Args:
        cluster: Where.
        folder: The run's folder.
    """

    def __init__(self, cluster: EmulatedCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.folder.parent.mkdir(parents=True, exist_ok=True)

    def line(self, *words: object, script: tuple[object, ...] = (TRAINING,)) -> list[str]:
        """The launch line."""
        sets = [word for setting in SETTINGS for word in ("--set", setting)]
        line = (sys.executable, "-m", "distkit.launch.command", "--run-dir", self.folder, *sets, *words, *script)
        return [str(word) for word in line]

    def once(self, *words: object, host: str = "host0", script: tuple[object, ...] = (TRAINING,)) -> str:
        """Run to an end that must be good; what it printed."""
        done = self.ended(*words, host=host, script=script)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def ended(
        self, *words: object, host: str = "host0", script: tuple[object, ...] = (TRAINING,)
    ) -> subprocess.CompletedProcess[str]:
        """Run to any end."""
        with self.started(*words, host=host, script=script) as process:
            status = process.wait(150)
            return subprocess.CompletedProcess(process.args, status, self.said(host))

    @contextmanager
    def started(
        self, *words: object, host: str = "host0", script: tuple[object, ...] = (TRAINING,)
    ) -> Iterator[subprocess.Popen[str]]:
        """A launch that goes on while the test does something; what it prints is in a file (see :meth:`said`)."""
        with self._output(host).open("a") as output:
            process = self.cluster.start(
                host,
                *self.line(*words, script=script),
                env=environment(),
                cwd=self.folder.parent,
                stdout=output,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)

    def said(self, host: str = "host0") -> str:
        """All that launches from a host printed."""
        return self._output(host).read_text()

    def _output(self, host: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}-{host}.out")

    def losses(self) -> dict[int, float]:
        """The loss of each step; of a step that was done twice, the last one."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return {}
        # The last line may be half written.
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def until_step(self, step: int, seconds: float = 90) -> None:
        """Wait until it was done."""
        until(lambda: max(self.losses(), default=0) >= step, seconds)

    def weights(self) -> set[str]:
        """Digests of the weights at the end, of all ranks: one if they are equal."""
        return {path.read_text() for path in self.weights_files()}

    def weights_files(self) -> list[Path]:
        """One for each rank that has come to its end."""
        return list(self.folder.glob("weights-*"))

    def sizes(self, rank: int = 0) -> list[int]:
        """Number of processes at each start of a rank."""
        return [int(line) for line in (self.folder / f"starts-{rank}").read_text().splitlines()]


def environment() -> dict[str, str]:
    """Variables for a launch: processes take distkit from this checkout, and a core each."""
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until it is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain"
        time.sleep(0.1)


def nothing_left(cluster: EmulatedCluster, seconds: float = 10) -> None:
    """No host has a process beside its services."""
    end = time.monotonic() + seconds
    while left := {host: found for host in cluster.hosts if (found := cluster.programs(host))}:
        assert time.monotonic() < end, left
        time.sleep(0.1)


MakeRun = Callable[[str], Run]
