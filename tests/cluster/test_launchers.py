"""Training on emulated hosts, two with two processes each, under every launcher and strategy: as on one process."""

from __future__ import annotations

import pytest

from tests.cluster.emulated import EmulatedCluster
from tests.cluster.running import HOSTS, STEPS, MakeRun, Run, nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def same(run: Run, single: dict[int, float]) -> None:
    """Each step's loss is that of one process."""
    assert run.losses() == pytest.approx(single, rel=1e-5)
    assert [run.sizes(rank) for rank in range(4)] == [[4]] * 4


def test_torchrun_over_ssh(cluster: EmulatedCluster, undisturbed: Run, single: dict[int, float]) -> None:
    same(undisturbed, single)
    assert single[STEPS] < single[1] - 0.05
    nothing_left(cluster)


@pytest.mark.parametrize("launcher", ["deepspeed", "horovodrun", "mpirun"])
def test_other_launchers(make: MakeRun, single: dict[int, float], launcher: str) -> None:
    run = make("run")
    run.folder.with_name("hostfile").write_text("host0:2\nhost1:2\n")
    run.once("-s", "ddp", "--launcher", launcher, "--hostfile", "hostfile")
    same(run, single)
    assert len(run.weights()) == 1
    nothing_left(run.cluster)


@pytest.mark.parametrize(
    "words",
    [["fsdp"], ["zero3"], ["zero3", "--set", "parallel.tensor=2"], ["horovod"]],
    ids=lambda words: "-".join(words),
)
def test_strategies(make: MakeRun, single: dict[int, float], words: list[str]) -> None:
    run = make("run")
    run.once("-s", *words, *HOSTS)
    same(run, single)
