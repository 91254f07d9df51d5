#!/usr/bin/env python3
"""Does every launcher start every strategy on several hosts, and do all train as one process?

Makes an emulated cluster of two hosts (scripts/cluster; needs root on Linux), trains the gpt recipe with two processes on
each under every launcher and strategy, and compares the loss of each step with one process on one host. Over ssh the hosts
are named on the launch line; under slurm distkit-run stands in an allocation of two nodes.

The table shows the largest relative difference of a loss, seconds from the launch line to its end, and what both hosts
sent over their links, in MB.

Examples:
  scripts/benchmarks/launchers.py
  scripts/benchmarks/launchers.py --strategies ddp,zero3 --launchers torchrun,slurm --steps 50
  scripts/benchmarks/launchers.py --launchers mpirun --bandwidth 1gbit --latency 1ms
  scripts/benchmarks/launchers.py --strategies fsdp --within 1e-5 --json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from venv_of_checkout import ROOT, use_venv

CLUSTER = ROOT / "scripts" / "cluster"
STRATEGIES = ("ddp", "fsdp", "zero3", "zero3+tensor", "horovod")
LAUNCHERS = ("torchrun", "deepspeed", "horovodrun", "mpirun", "slurm")
LIMIT_S = 300


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    launcher: str
    strategy: str
    difference: float
    seconds: float
    megabytes: float


class Cluster:
    """Two emulated hosts."""

    def __init__(self) -> None:
        self.name = f"launchers-{os.getpid()}"

    @contextmanager
    def up(self, *shape: str) -> Iterator[None]:
        """While a block runs."""
        self.command("up", "--hosts", "2", *shape)
        try:
            yield
        finally:
            self.command("down")

    @contextmanager
    def slurm(self) -> Iterator[None]:
        """Slurm, while a block runs."""
        self.command("slurm", "up", "--cpus", "4")
        try:
            yield
        finally:
            self.command("slurm", "down")

    def command(self, *words: str) -> str:
        """A command of scripts/cluster; what it prints."""
        place = 2 if words[0] == "slurm" else 1
        line = [str(CLUSTER), *words[:place], "--name", self.name, *words[place:]]
        return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout

    def run(self, words: Sequence[str]) -> None:
        """A command on the first host."""
        line = [str(CLUSTER), "exec", "--name", self.name, "host0", "--", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(line, check=True, env=environment, capture_output=True, text=True, timeout=LIMIT_S)

    def sent(self) -> int:
        """Bytes that both hosts sent so far."""
        return sum(int(host["sent_bytes"]) for host in json.loads(self.command("counters", "--json")).values())


def main() -> int:
    use_venv()
    arguments = parse_arguments()
    cluster, rows, failed = Cluster(), [], []
    with tempfile.TemporaryDirectory() as folder, cluster.up(*shape_of(arguments)):
        cluster.run(recipe(Path(folder, "single"), ["-s", "single"], arguments.steps))
        reference = losses(Path(folder, "single"))
        for launcher in arguments.launchers:
            with cluster.slurm() if launcher == "slurm" else nothing():
                for strategy in arguments.strategies:
                    try:
                        row = measure(cluster, Path(folder), launcher, strategy, arguments.steps, reference)
                    except (subprocess.SubprocessError, ValueError) as error:
                        failed.append(f"{strategy} by {launcher}: {error}")
                        print(failed[-1], getattr(error, "stderr", None) or "", sep="\n", file=sys.stderr, flush=True)
                        continue
                    rows.append(row)
                    if not arguments.json:
                        show(row, first=len(rows) == 1)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    too_far = [row for row in rows if arguments.within is not None and row.difference > arguments.within]
    for row in too_far:
        print(f"{row.strategy} by {row.launcher}: {row.difference:.1e} from single", file=sys.stderr)
    return int(bool(failed or too_far))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", type=names, default=list(STRATEGIES), help=f"any of {', '.join(STRATEGIES)}")
    parser.add_argument("--launchers", type=names, default=list(LAUNCHERS), help=f"any of {', '.join(LAUNCHERS)}")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--bandwidth", default="none", help="of each host's link, such as 1gbit; without a limit")
    parser.add_argument("--latency", default="none", help="from host to host, such as 1ms; none")
    parser.add_argument("--within", type=float, help="exit with status 1 if a loss is further from single's")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    for option, chosen, known in (
        ("--strategies", arguments.strategies, STRATEGIES),
        ("--launchers", arguments.launchers, LAUNCHERS),
    ):
        unknown = [name for name in chosen if name not in known]
        if unknown:
            parser.error(f"{option} has {unknown[0]!r}; there are: {', '.join(known)}")
    return arguments


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def shape_of(arguments: argparse.Namespace) -> list[str]:
    return ["--bandwidth", arguments.bandwidth, "--latency", arguments.latency]


@contextmanager
def nothing() -> Iterator[None]:
    yield


def recipe(run_dir: Path, words: Sequence[str], steps: int) -> list[str]:
    """The launch line."""
    settings = ["batch.per=global", f"max_steps={steps}", "log.every_steps=1", "log.to=[jsonl]", "optim.clip_norm=1"]
    settings += ["checkpoint.at_end=false", "device=cpu"]
    sets = [word for setting in settings for word in ("--set", setting)]
    script = str(ROOT / "recipes" / "gpt" / "train.py")
    line = [sys.executable, "-m", "distkit.launch.command", *words, "--run-dir", str(run_dir), *sets, script]
    return [*line, "--bytes", "60000"]


def measure(
    cluster: Cluster, folder: Path, launcher: str, strategy: str, steps: int, reference: dict[int, float]
) -> Row:
    """Train once.

    Raises:
        ValueError: Some steps are not in its log.
    """
    name, _, tensor = strategy.partition("+")
    words = ["-s", name, *(["--set", "parallel.tensor=2"] if tensor else [])]
    run_dir = folder / f"{launcher}-{strategy}"
    if launcher == "slurm":
        words = recipe(run_dir, words, steps)
        words = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "--time=10", *words]
    else:
        words = recipe(run_dir, [*words, "--launcher", launcher, "--hosts", "host0:2,host1:2"], steps)
    sent, start = cluster.sent(), time.perf_counter()
    cluster.run(words)
    seconds, sent = time.perf_counter() - start, cluster.sent() - sent
    found = losses(run_dir)
    if found.keys() != reference.keys():
        raise ValueError(f"{len(found)} steps were logged, and {len(reference)} by single")
    difference = max(abs(found[step] / reference[step] - 1) for step in found)
    return Row(launcher, strategy, difference, round(seconds, 1), round(sent / 1e6, 1))


def losses(run_dir: Path) -> dict[int, float]:
    """The training loss of each step."""
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def show(row: Row, *, first: bool) -> None:
    if first:
        print(f"{'launcher':<12}{'strategy':<14}{'rel. diff':>10}{'seconds':>9}{'MB sent':>9}")
    print(
        f"{row.launcher:<12}{row.strategy:<14}{row.difference:>10.1e}{row.seconds:>9.1f}{row.megabytes:>9.1f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
