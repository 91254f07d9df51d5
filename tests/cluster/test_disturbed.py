"""Launches on emulated hosts that go wrong: ranks that fail, hosts and links that are lost, Ctrl-C, hosts that aren't fit."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.cluster.running import CHECKPOINTS, HOSTS, STEPS, TRAINING, MakeRun, Run, nothing_left, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SLOWLY = (TRAINING, "--pause", "0.5")


def as_undisturbed(run: Run, undisturbed: Run) -> None:
    """The same samples in the same steps: all losses and weights are the same bits."""
    assert run.losses() == undisturbed.losses()
    assert run.weights() == undisturbed.weights()


# -- started by hand ----------------------------------------------------------------------------------------------------


def test_by_hand(make: MakeRun, undisturbed: Run) -> None:
    run = make("run")
    words = ["-s", "ddp", "--nnodes", "2", "--nproc", "2", "--master-addr", "host0", "--node-rank"]
    with (
        run.started(*words, "1", host="host1") as second,
        run.started(*words, "0", host="host0") as first,
    ):
        assert (first.wait(90), second.wait(30)) == (0, 0), run.said("host0") + run.said("host1")
    as_undisturbed(run, undisturbed)


def test_by_hand_at_an_endpoint(make: MakeRun, undisturbed: Run) -> None:
    """One host is lost in the middle and comes back."""
    run, cluster = make("run"), make("run").cluster
    words = ["-s", "ddp", "--nnodes", "1:2", "--nproc", "2", "--meet-at", "host0:29400", "--max-restarts", "2"]
    words += [*CHECKPOINTS]
    with run.started(*words, script=SLOWLY) as first:
        with run.started(*words, host="host1", script=SLOWLY) as second:
            run.until_step(5)
            cluster.kill("host1")
            assert second.wait(10) == -signal.SIGKILL
        cluster.boot("host1")
        with run.started(*words, host="host1", script=SLOWLY) as second:
            assert (first.wait(120), second.wait(30)) == (0, 0), run.said("host0") + run.said("host1")
    assert run.sizes()[0] == run.sizes()[-1] == 4
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-5)
    nothing_left(cluster)


# -- failures -----------------------------------------------------------------------------------------------------------


def test_an_exception_on_another_host(make: MakeRun) -> None:
    run = make("run")
    done = run.ended("-s", "ddp", *HOSTS, script=(TRAINING, "--fail", "3"))
    assert done.returncode == 1
    assert done.stdout.count("distkit-run: rank 3 of 4 failed on host1") == 1
    assert done.stdout.count("Traceback") == 1
    assert done.stdout.rstrip().endswith("RuntimeError: the number 3 was drawn")
    assert not re.search(r"failed on host0|is lost", done.stdout)
    nothing_left(run.cluster)


def test_a_host_is_killed(make: MakeRun) -> None:
    run = make("run")
    with run.started("-s", "ddp", *HOSTS, script=SLOWLY) as process:
        run.until_step(3)
        run.cluster.kill("host1")
        killed = time.monotonic()
        assert process.wait(40) == 255
        assert time.monotonic() - killed < 30
    said = run.said()
    assert re.search(r"host1 is lost: .*; its last sign of life was \d+\.\d s ago", said)
    assert re.search(r"the processes on the other hosts ended \d+\.\d s after that", said)
    assert "host1 (the host was lost with ranks 2 to 3: " in said
    nothing_left(run.cluster)


def test_a_link_is_cut_and_the_run_goes_on(make: MakeRun, undisturbed: Run) -> None:
    """The processes on the host that was cut off end by themselves, and the host is taken back when it answers."""
    run, cluster = make("run"), make("run").cluster
    with run.started("-s", "ddp", *HOSTS, "--max-restarts", "1", *CHECKPOINTS, script=SLOWLY) as process:
        run.until_step(5)
        cluster.link("host1", up=False)
        cut = time.monotonic()
        until(lambda: "host1 is lost: no sign of life for" in run.said(), 25)
        until(lambda: "all ranks start again (restart 1 of 1)" in run.said(), 35)
        said = time.monotonic() - cut
        until(lambda: not cluster.programs("host1"), 40)  # they have timeouts.grace_s from when they noticed
        assert said < 40
        assert process.poll() is None
        cluster.link("host1", up=True)
        assert process.wait(90) == 0, run.said()
    assert run.sizes() == run.sizes(2) == [4, 4]
    as_undisturbed(run, undisturbed)
    nothing_left(cluster)


def test_ctrl_c(make: MakeRun) -> None:
    run = make("run")
    with run.started("-s", "ddp", *HOSTS, "--set", "checkpoint.at_end=true", script=SLOWLY) as process:
        run.until_step(3)
        process.send_signal(signal.SIGINT)
        assert process.wait(40) == 130
    assert run.said().rstrip().endswith("distkit-run: stopped by Ctrl-C (SIGINT)")
    last = max(run.losses())
    assert last < STEPS
    assert [path.name for path in (run.folder / "checkpoints").glob("step-*")] == [f"step-{last:08d}"]
    nothing_left(run.cluster)


# -- before the start ---------------------------------------------------------------------------------------------------


def test_hosts_that_are_not_fit(make: MakeRun) -> None:
    """One table has all that is wrong."""
    run, cluster = make("run"), make("run").cluster
    cluster.link("host1", up=False)
    run.folder.with_name("hostfile").write_text("host0 slots=2\nhost1 slots=2\nhost2 slots=2\n")
    words = ["--hostfile", "hostfile", "--interface", "eth7", "--ssh-option", "ConnectTimeout=3"]
    done = run.ended("-s", "ddp", *words)
    assert done.returncode == 2
    assert done.stdout.count("What to do") == 1
    said = " ".join(done.stdout.split())
    assert re.search(r"host0 has no interface eth7; it has ", said)
    assert re.search(r"host1 can't be reached over ssh", said)
    assert re.search(r"host2 can't be reached over ssh", said)
    assert "3 problems on 3 of 3 hosts (the table above); nothing was started" in said
    assert not (run.folder / "logs").exists()
    nothing_left(cluster)
