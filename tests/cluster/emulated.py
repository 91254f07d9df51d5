"""Emulated hosts for tests: scripts/cluster as an object."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "cluster"
LOCK = Path(tempfile.gettempdir(), "distkit-cluster-tests.lock")
OWN_PROCESSES = {"sshd", "munged", "slurmctld", "slurmd", "slurmscriptd"}


class EmulatedCluster:
    """A cluster that exists inside a `with` block.

    Args:
        suffix: tells several clusters of one process apart.
        hosts: how many.
        bandwidth: of each host's link, in each direction, such as 200mbit.
        latency: from host to host, one way, such as 5ms.
    """

    def __init__(self, suffix: str = "", hosts: int = 2, bandwidth: str = "none", latency: str = "none") -> None:
        self.name = f"test-{os.getpid()}{suffix}"
        self.shape = ["--hosts", str(hosts), "--bandwidth", bandwidth, "--latency", latency]
        self.hosts = [f"host{number}" for number in range(hosts)]

    def __enter__(self) -> EmulatedCluster:
        remove_left_behind()
        self.command("up", *self.shape)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.command("down")

    def command(self, word: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a subcommand of scripts/cluster on this cluster."""
        done = subprocess.run(
            [str(SCRIPT), word, "--name", self.name, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 or not check, f"cluster {word}: {done.stdout}{done.stderr}"
        return done

    def line(self, host: str, *words: object) -> list[str]:
        """The command line that runs words on a host."""
        return [str(SCRIPT), "exec", "--name", self.name, host, "--", *map(str, words)]

    def exec(
        self,
        host: str,
        *words: object,
        timeout: float = 60,
        check: bool = True,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and wait for it.

        Args:
            host: where.
            words: the command.
            timeout: seconds until it is killed and the test fails.
            check: fail if its status isn't 0.
            env: variables beside those of this process.
            cwd: where it runs; by default here.
        """
        done = subprocess.run(
            self.line(host, *words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **(env or {})},
            cwd=cwd,
        )
        assert done.returncode == 0 or not check, f"status {done.returncode} of {words}: {done.stdout}{done.stderr}"
        return done

    def start(
        self, host: str, *words: object, env: dict[str, str] | None = None, cwd: Path | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on a host. Its process id is that of the command itself.

        Args:
            host: where.
            words: the command.
            env: variables beside those of this process.
            cwd: where it runs; by default here.
            options: of subprocess.Popen. By default standard output and standard error are one pipe.
        """
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        return subprocess.Popen(
            self.line(host, *words),
            text=True,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
            **options,
        )

    def kill(self, host: str) -> None:
        """Kill all that runs on a host, as a power cut does."""
        self.command("kill", host)

    def boot(self, host: str) -> None:
        """Bring a killed host back."""
        self.command("boot", host)

    def link(self, host: str, up: bool) -> None:
        """Cut a host's link, so that its packets vanish, or mend it."""
        self.command("link", host, "up" if up else "down")

    def counters(self) -> dict[str, dict[str, int]]:
        """sent_bytes, received_bytes, sent_packets and received_packets of each host's link, since the cluster is up."""
        found: dict[str, dict[str, int]] = json.loads(self.command("counters", "--json").stdout)
        return found

    def facts(self) -> dict[str, Any]:
        """What `list --json` says of this cluster."""
        return next(cluster for cluster in clusters() if cluster["name"] == self.name)

    def programs(self, host: str) -> dict[int, list[str]]:
        """What runs on a host beside its services: the command line of each process id."""
        facts = next(facts for facts in self.facts()["hosts"] if facts["host"] == host)
        found = {}
        for pid, name in facts["processes"].items():
            if name not in OWN_PROCESSES and psutil.pid_exists(int(pid)):
                found[int(pid)] = psutil.Process(int(pid)).cmdline()
        return found

    @contextmanager
    def slurm(self, cpus: int = 4) -> Iterator[None]:
        """Slurm, each host a node, for a `with` block. srun, sbatch and the like are then run on a host.

        Args:
            cpus: of each node, whatever this machine has.
        """
        self.command("slurm", "up", "--cpus", str(cpus))
        try:
            yield
        finally:
            self.command("slurm", "down")

    def mend(self) -> None:
        """Undo what a test did: links up, hosts there, and nothing left running on them."""
        for facts in self.facts()["hosts"]:
            host = facts["host"]
            if facts["link"] == "down":
                self.link(host, up=True)
            if set(facts["processes"].values()) != {"sshd"} or len(facts["processes"]) != 1:
                self.kill(host)
                self.boot(host)


def clusters() -> list[dict[str, Any]]:
    """All clusters of this machine."""
    done = subprocess.run([str(SCRIPT), "list", "--json"], capture_output=True, text=True, check=True, timeout=60)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def remove_left_behind() -> None:
    """Take down clusters of test processes that are gone without having done so."""
    for cluster in clusters():
        found = re.match(r"test-(\d+)", cluster["name"])
        if found and not psutil.pid_exists(int(found[1])):
            subprocess.run(
                [str(SCRIPT), "down", "--name", cluster["name"]], check=True, capture_output=True, timeout=60
            )


@contextmanager
def turn() -> Iterator[None]:
    """One test on emulated hosts at a time on this machine, however many processes run tests."""
    with LOCK.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
