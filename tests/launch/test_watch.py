"""H4: ranks that are late are found, named, and show where they stand."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from distkit.heartbeat import Heartbeat, heartbeat_path
from distkit.launch.causes import likely_cause
from distkit.launch.failure import ErrorRecord, Failure
from distkit.launch.report import failure_report
from distkit.launch.watch import Beat, HangWatch, late_beats
from tests.launch.support import Launch, wait_until


def beat(rank: int, step: int, phase: str, at: float = 0.0) -> Beat:
    return Beat(rank, "host0", 1, phase, step, at)


def test_who_is_late() -> None:
    assert late_beats([beat(0, 5, "step"), beat(1, 4, "step"), beat(2, 5, "data")]) == [beat(1, 4, "step")]
    waiting, loading = beat(0, 5, "save", 9.0), beat(1, 5, "data", 3.0)
    assert late_beats([waiting, loading, beat(2, 5, "save", 8.0)]) == [loading]
    assert late_beats([beat(0, 5, "step"), beat(1, 5, "step")]) == [] == late_beats([])


def write(run_dir: Path, rank: int, phase: str, step: int, age: float) -> None:
    path = heartbeat_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"rank": rank, "host": "h", "pid": 1, "phase": phase, "step": step, "time": time.time() - age}
    path.write_text(json.dumps(found))


def test_a_standstill_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = HangWatch(tmp_path, 2, step_s=0.2)
    watch._began -= 100
    for rank, phase, age in ((0, "step", 0.0), (1, "step", 5.0)):
        write(tmp_path, rank, phase, 7, age)
    time.sleep(0.1)
    assert watch.look() is None  # rank 0 has just moved
    write(tmp_path, 0, "main_first", 7, 5.0)
    time.sleep(0.1)
    assert watch.look() is None  # rank 0 may work as long as it likes
    write(tmp_path, 0, "save", 7, 4.0)
    time.sleep(0.1)
    found = watch.look()
    assert found is not None and found[1] and [b.rank for b in late_beats(found[0])] == [1]
    time.sleep(0.1)
    assert watch.look() is None


def test_the_file_of_a_rank(tmp_path: Path) -> None:
    class Owner:
        pass

    owner = Owner()
    heart = Heartbeat(tmp_path, 3, owner)
    heart.beat("save", 40)
    wait_until(lambda: Beat.read(tmp_path, 3) is not None and Beat.read(tmp_path, 3).phase == "save", 10)  # type: ignore[union-attr]
    heart.close()
    found = Beat.read(tmp_path, 3)
    assert found is not None and (found.rank, found.phase, found.step) == (3, "closed", 40)
    assert [path.name for path in (tmp_path / "heartbeat").iterdir()] == ["rank-003.json"]


HANG = """
    import torch, distkit, time
    def look_up_words(n):
        if trainer.world.rank == 1 and n == 2:
            time.sleep(600)
    with distkit.Trainer({"log.every_steps": 1, "device": "cpu"}) as trainer:
        net = torch.nn.Linear(4, 1)
        data = torch.utils.data.TensorDataset(torch.randn(64, 4))
        net, opt, loader = trainer.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), torch.utils.data.DataLoader(data, batch_size=4)
        )
        for n, (x,) in enumerate(loader):
            look_up_words(n)
            trainer.step(net(x).mean())
"""


@pytest.mark.parametrize(("launcher", "strategy"), [("torchrun", "ddp"), ("horovodrun", "horovod")])
def test_a_rank_that_hangs_shows_where(launch: Launch, launcher: str, strategy: str) -> None:
    launch.script(HANG)
    limits = ("--set", "timeouts.step_s=8", "--set", "timeouts.grace_s=2")
    done = launch.run("--launcher", launcher, "-s", strategy, "--nproc", "2", *limits, "script.py")
    assert done.returncode == 1
    assert (
        "distkit-run: ranks wait for rank 1 of 2 on " in done.stderr
        and "late: at step 2, phase step, for" in done.stderr
    )
    report = done.stderr[done.stderr.index("ranks wait for") :]
    assert "then: rank 0, " in report and "line 5 in look_up_words" in report
    assert "runpy" not in report and "heartbeat" not in report
    wait_until(lambda: not launch.left(), 20)


@pytest.mark.parametrize(
    ("error", "message", "cause"),
    [
        ("RuntimeError", "The server socket has failed to listen: EADDRINUSE", "--master-port"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", "batch.size"),
        ("RuntimeError", "NCCL error: ncclSystemError: System call failed", "--interface"),
        ("OSError", "[Errno 28] No space left on device", "disk is full"),
        ("RuntimeError", "Error(s) in loading state_dict: size mismatch for a.weight", "another model"),
        ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Bus error", "shm"),
        ("ModuleNotFoundError", "No module named 'tiktoken'", "environment"),
    ],
)
def test_likely_causes(error: str, message: str, cause: str) -> None:
    record = ErrorRecord(0, "host0", 1, 1.0, error, message, "Traceback\n", 1)
    failure = Failure(0, "host0", 1, 1.0, "/none", record)
    assert cause in str(likely_cause(failure))
    assert "  likely cause: " in failure_report(failure, [], processes=2)


def test_an_error_with_a_hint_speaks_for_itself() -> None:
    record = ErrorRecord(0, "host0", 1, 1.0, "CheckpointError", "size mismatch for a\nHint: x", "Traceback\n", 1)
    assert likely_cause(Failure(0, "host0", 1, 1.0, "/none", record)) is None
    assert likely_cause(Failure(0, "h", 1, 1.0, "/none", ErrorRecord(0, "h", 1, 1.0, "ValueError", "x", "", 1))) is None
