"""Real launches of small scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil

COMMAND = [sys.executable, "-m", "distkit.launch.command"]


class Launch:
    """Starts `distkit-run` in a folder of its own and ends what is left of it after the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("DISTKIT_")}
        self.environ["OMP_NUM_THREADS"] = "1"
        self._started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def start(self, *words: str, run_dir: Path | None = None, **options: object) -> subprocess.Popen[str]:
        command = [*COMMAND, "--run-dir", str(run_dir or self.run_dir), *words]
        return self.popen(command, **options)

    def popen(self, command: list[str], **options: object) -> subprocess.Popen[str]:
        settings: dict[str, object] = {
            "cwd": self.folder,
            "env": self.environ,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            **options,
        }
        process: subprocess.Popen[str] = subprocess.Popen(command, **settings)  # type: ignore[call-overload]
        self._started.append(process)
        return process

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def left(self) -> list[psutil.Process]:
        """Living processes whose command line names this test's folder."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(self.folder) in word for word in words):
                found.append(process)
        return found

    def log(self, rank: int) -> str:
        return (self.run_dir / "logs" / f"rank-{rank:03d}.log").read_text()

    def wait_for(self, *names: str, seconds: float = 90) -> list[str]:
        """The contents of files that the script writes into the folder."""
        wait_until(lambda: all((self.folder / name).exists() for name in names), seconds)
        return [(self.folder / name).read_text() for name in names]

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait(10)
        for process in self.left():
            process.kill()


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.05)
