"""A disk that is full doesn't end a training that only wanted to print, and doesn't hide an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.disks import can_mount, fill, small_disk
from tests.launch.support import Launch

pytestmark = pytest.mark.skipif(not can_mount(), reason="mounting a small disk needs root")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_log_can_not_be_written(launch: Launch, tmp_path: Path, rank: int) -> None:
    disk = tmp_path / "disk"
    launch.script(f"""
        import os, sys, time
        open("up-" + os.environ["RANK"], "w").write("x")
        while not os.path.exists("go"):
            time.sleep(0.01)
        for n in range(300):
            print("line", n, "." * 100)
            sys.stderr.write("another" + "." * 100 + "\\n")
        if os.environ["RANK"] != "{rank}":
            time.sleep(60)
        raise ValueError("boom" * 3)
    """)
    with small_disk(disk, 1 << 20):
        process = launch.start("--nproc", "2", "--set", "timeouts.grace_s=1", "script.py", run_dir=disk / "run")
        launch.wait_for("up-0", "up-1")
        filler = fill(disk)
        (launch.folder / "go").touch()
        out, err = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "line 299" in out
        assert f"error-rank-00{rank}.json can't be written: No space left on device; the error itself:" in err
        assert 'raise ValueError("boom" * 3)\nValueError: boomboomboom\n' in err
        assert "lost sys.stderr" not in err
        filler.unlink()
    assert not launch.left()
