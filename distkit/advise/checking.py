"""`distkit plan --check`: a few real steps of a script on this machine, and what was predicted for them beside it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.advise.hardware import Hardware, parse_hardware
from distkit.advise.layout import Layout, layout_of_run
from distkit.advise.memory import OPTIMIZERS, memory_of
from distkit.advise.script import Script, SeenScript, quiet_overrides
from distkit.advise.traffic import Collective, collectives_of
from distkit.config.nearest import nearest
from distkit.errors import LaunchError, PlanError

if TYPE_CHECKING:
    from distkit.config import Config

__all__ = ["Compared", "check_script"]

STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Compared:
    """One figure, both ways.

    Args:
        what: A kind of memory, or of traffic.
        predicted: Bytes, of a rank.
        measured: Bytes; None where this machine doesn't say.
        how: How it was measured.
    """

    what: str
    predicted: float
    measured: float | None
    how: str

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to what was measured; None without that, or where it is 0 and 0 was said."""
        if self.measured is None:
            return None
        if not self.measured:
            return None if abs(self.predicted) < 1 else float("inf")
        return self.predicted / self.measured - 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        measured = None if self.measured is None else round(self.measured)
        error = None if self.error is None else round(self.error, 5)
        return {
            "what": self.what, "predicted": round(self.predicted), "measured": measured, "error": error, "how": self.how,
        }  # fmt: skip


def check_script(script: Script, seen: SeenScript, *, nproc: str) -> tuple[str, list[Compared]]:
    """Train a few steps, and compare.

    Args:
        script: With the settings that its run is to have.
        seen: What it trains.
        nproc: Processes, as for `distkit-run`.

    Returns:
        A line that says what was run, and the figures.

    Raises:
        PlanError: The optimizer isn't one whose states are known.
        LaunchError: The run failed, or ended before enough steps were taken.
    """
    config = seen.config_for(script)
    if seen.optimizer not in OPTIMIZERS:
        near = nearest(seen.optimizer, list(OPTIMIZERS))
        raise PlanError(
            f"the script's optimizer is {seen.optimizer}, whose states aren't known; known: {', '.join(OPTIMIZERS)}",
            hint=f"torch.optim.{'AdamW' if near is None else near.capitalize()}(...)",
        )
    ranks = _measured(script, config, nproc)
    first = ranks[0]
    run = _Run(config, seen, first["processes"], first["data"], first["tensor"])
    line = (
        f"{config.strategy} on {first['processes']} processes, {first['device']}, {config.precision}, micro batch "
        f"{run.micro:g} x accumulate {run.accumulate}"
    )
    return line, [*_memory(run, ranks), *_traffic(run, ranks)]


class _Run:
    """The run that was measured, as the advisor sees it."""

    def __init__(self, config: Config, seen: SeenScript, processes: int, data: int, tensor: int) -> None:
        from distkit.data.batch import resolve_batch

        self.config, self.seen = config, seen
        plan = resolve_batch(config.batch, seen.batch, data)
        self.micro, self.accumulate = float(plan.micro or 1), plan.accumulate
        self.layout: Layout = layout_of_run(
            config.strategy, processes, tensor=tensor, replicas=_replicas(config, processes),
            offload=config.memory.offload, recompute=config.memory.activation_checkpointing,
        )  # fmt: skip
        nodes = self.layout.data // self.layout.shard_ranks if config.strategy == "hsdp" else 1
        device = parse_hardware("1xA100-80G")  # bytes don't depend on it
        self.hardware: Hardware = replace(device, nodes=nodes, each=processes // nodes)
        self.same: dict[str, Any] = {
            "micro": self.micro, "accumulate": self.accumulate, "sequence": seen.tokens,
            "optimizer": seen.optimizer, "precision": config.precision,
        }  # fmt: skip

    def collectives(self) -> list[Collective]:
        return collectives_of(self.seen.model, self.layout, self.hardware, **self.same)


def _replicas(config: Config, processes: int) -> int:
    if config.strategy != "hsdp":
        return 1
    from distkit.strategies.fsdp_settings import choose_replicas

    return choose_replicas(config, processes, 1)[0]


def _memory(run: _Run, ranks: Sequence[dict[str, Any]]) -> list[Compared]:
    memory = memory_of(run.seen.model, run.layout, fused_attention=True, cpu=True, **run.same)
    cuda = ranks[0]["device"] == "cuda"
    found = []
    for kind in STATES:
        predicted = float(getattr(memory, kind)) + float(getattr(memory, f"host_{kind}"))  # both memories are counted
        found.append(Compared(kind, predicted, max(rank[kind] for rank in ranks), "storages counted"))
    states = sum(one.predicted for one in found)
    found.append(Compared("model states", states, sum(one.measured or 0.0 for one in found), "storages counted"))
    measured = max(rank["rest"] + rank["above_rest"] for rank in ranks)
    how = "allocator's peak" + ("" if cuda else ", by the profiler")
    found.append(Compared("peak of a step", states + memory.activations + memory.buffers, measured, how))
    return found


def _traffic(run: _Run, ranks: Sequence[dict[str, Any]]) -> list[Compared]:
    collectives = run.collectives()
    sent = sum(rank["sent"] for rank in ranks) / len(ranks)
    found = [Compared("collectives", sum(one.sent for one in collectives), sent, "calls counted, sent in rings")]
    sockets = [rank["sockets"] for rank in ranks if rank["sockets"] is not None]
    if sockets and "gloo" in ranks[0]["backend"]:
        carried = sum(one.sent * (2 if one.what == "reduce_scatter" else 1) for one in collectives)
        found.append(
            Compared("on the wire (gloo)", carried, sum(sockets) / len(sockets), "sockets; it reduces and scatters by all-reduce")
        )  # fmt: skip
    return found


def _measured(script: Script, config: Config, nproc: str) -> list[dict[str, Any]]:
    """Each rank's counts."""
    from distkit.launch.build import build_plan
    from distkit.launch.machine import Machine
    from distkit.launch.plan import LaunchOptions
    from distkit.measuring import MEASURED_STEPS

    with tempfile.TemporaryDirectory(prefix="distkit-check-") as folder:
        options = LaunchOptions(
            script=script.path,
            arguments=tuple(script.arguments),
            strategy=config.strategy,
            config=script.config,
            overrides=(*script.overrides, *quiet_overrides(folder)),
            nproc=nproc,
            launcher="torchrun",
            preview={"what": "measure", "folder": folder},
        )
        (host,) = build_plan(options, Machine.here(claim=True)).hosts
        ended = subprocess.run(
            list(host.command), cwd=host.directory, env={**os.environ, **host.environment}, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        files = sorted(Path(folder).glob("measured-*.json"))
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if not found or len(found) < found[0]["processes"]:
        last = "\n  ".join(ended.stdout.strip().splitlines()[-12:])
        raise LaunchError(
            f"the run took fewer than {MEASURED_STEPS} steps, or failed (exit status {ended.returncode}):\n  {last}",
            hint=f"distkit-run -s {config.strategy} --nproc {nproc} {script.path}   shows all of it",
        )
    return found
