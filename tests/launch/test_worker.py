"""One worker without its agent: the script runs as under `python`, and failures leave a record."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from distkit.launch.output import LineWriter


class Worker:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, text: str, *arguments: str, rank: int = 0, module: bool = False, words: tuple[str, ...] = ()) -> str:
        (self.folder / "script.py").write_text(textwrap.dedent(text))
        target = ["-m", "script"] if module else [str(self.folder / "script.py")]
        command = [sys.executable, "-m", "distkit.launch.worker", "--run-dir", str(self.folder / "run"), *words]
        environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
        self.done = subprocess.run(
            [*command, *target, *arguments], cwd=self.folder, env=environ, capture_output=True, text=True, timeout=60
        )
        return self.done.stdout

    def record(self, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "run" / "logs" / f"error-rank-{rank:03d}.json").read_text())
        return found

    def log(self, rank: int = 0) -> str:
        return (self.folder / "run" / "logs" / f"rank-{rank:03d}.log").read_text()


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


def test_the_script_sees_what_python_would_show_it(worker: Worker) -> None:
    text = "import sys; print(__name__, sys.argv[1:], sys.path[0], sys.modules['__main__'].__file__)"
    script = worker.folder / "script.py"
    assert worker.run(text, "-x", "--help") == f"__main__ ['-x', '--help'] {worker.folder} {script}\n"
    assert worker.run(text, "-m", module=True) == f"__main__ ['-m'] {worker.folder} {script}\n"
    assert worker.done.returncode == 0


def test_rank_0_writes_to_screen_and_log_the_others_to_the_log(worker: Worker) -> None:
    text = """
        import os, sys
        print("printed"); print("error", file=sys.stderr); os.system("echo from a subprocess")
        print("10%\\r50%\\r\\x1b[32m100%\\x1b[0m"); print("unfinished", end="")
        sys.stdout.console.write("bare\\n") if hasattr(sys.stdout, "console") else None
    """
    shown = worker.run(text)
    assert shown.startswith("printed\n") and shown.endswith("bare\n") and worker.done.stderr == "error\n"
    assert worker.log().splitlines()[1:] == ["printed", "error", "100%", "unfinished"]
    assert worker.log().startswith("---- rank 0 of 2, ")
    assert worker.run(text, rank=1) == ""
    assert worker.done.stderr == ""
    assert {"printed", "error", "from a subprocess"} <= set(worker.log(1).splitlines())
    shown = worker.run(text, rank=1, words=("--output", "all"))
    assert shown.splitlines()[0] == "[rank 1] printed" and "[rank 1] unfinished" in shown
    assert worker.log(1).count("---- rank 1 of 2") == 2


def test_an_exception_leaves_the_scripts_own_traceback(worker: Worker) -> None:
    worker.run("def f():\n    raise ValueError('boom')\nf()\n")
    record = worker.record()
    assert worker.done.returncode == 1 and worker.done.stderr == ""  # the agent shows it, once and last
    assert record["type"] == "ValueError" and record["message"] == "boom" and record["exit_code"] == 1
    assert record["traceback"].startswith("Traceback") and record["traceback"].endswith("ValueError: boom\n")
    assert "runpy" not in record["traceback"] and "worker.py" not in record["traceback"]
    assert record["traceback"] in worker.log()


def test_a_syntax_error_names_its_line(worker: Worker) -> None:
    worker.run("x = 1\ny = = 2\n")
    assert "script.py" in worker.record()["traceback"] and "line 2" in worker.record()["traceback"]


def test_an_error_of_distkit_is_its_message(worker: Worker) -> None:
    worker.run("from distkit.config import load_config\nload_config(overrides=['seeed=1'])\n")
    lines = worker.record()["traceback"].splitlines()
    assert lines[-2].startswith("ConfigError: unknown key 'seeed'") and lines[-1] == "Hint: did you mean seed?"
    assert "load_config(overrides" in worker.record()["traceback"] and "load.py" not in worker.record()["traceback"]
    assert "load.py" in worker.log()  # for who needs it


@pytest.mark.parametrize(
    ("code", "status", "message"), [("0", 0, ""), ("None", 0, ""), ("3", 3, ""), ("'too bad'", 1, "too bad")]
)
def test_exit_statuses(worker: Worker, code: str, status: int, message: str) -> None:
    worker.run(f"import sys; sys.exit({code})")
    assert worker.done.returncode == status and worker.done.stderr.strip() == message
    if status:
        assert worker.record()["exit_code"] == status and worker.record()["message"] == message


def test_keyboard_interrupt(worker: Worker) -> None:
    worker.run("raise KeyboardInterrupt")
    assert worker.done.returncode == 130 and worker.done.stderr == ""


def test_the_scripts_own_excepthook_is_called(worker: Worker) -> None:
    worker.run("import sys\nsys.excepthook = lambda *a: open('told', 'w').write(a[0].__name__)\n1/0\n")
    assert (worker.folder / "told").read_text() == "ZeroDivisionError"


def test_a_failed_rank_that_cannot_end_is_ended(worker: Worker) -> None:
    (worker.folder / "script.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nraise ValueError('boom')\n"
    )
    code = (
        "import sys, distkit.launch.worker as worker\nworker._END_WITHIN_S = 0.5\n"
        "sys.exit(worker.main(['--run-dir', 'run', 'script.py']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=worker.folder, capture_output=True, timeout=20)
    assert done.returncode == 1 and "Timeout" in worker.log()


def test_lines_of_several_ranks_do_not_mix() -> None:
    written: list[str] = []
    writer = LineWriter(written.append, prefix="[rank 1] ")
    for piece in ("a", "b\nc", "", "\n\nd"):
        writer.write(piece)
    assert written == ["[rank 1] ab\n", "[rank 1] c\n[rank 1] \n"]
    writer.close()
    assert written[-1] == "[rank 1] d\n"


def test_lines_of_rank_0_stay_whole_but_progress_bars_move() -> None:
    written: list[str] = []
    writer = LineWriter(written.append, redraws=True)
    for piece in ("a", " b\n", "\r 10%", "\r 50%", "\r100%\nc"):
        writer.write(piece)
    assert written == ["a b\n", "\r", " 10%\r", " 50%\r100%\n"]


@pytest.mark.parametrize("output", ["main", "all"])
def test_a_reader_behind_a_pipe_sees_each_line_at_once(worker: Worker, output: str) -> None:
    (worker.folder / "script.py").write_text("import time\nprint('now', 'then')\ntime.sleep(60)\n")
    words = [sys.executable, "-m", "distkit.launch.worker", "--run-dir", "run", "--output", output, "script.py"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(words, cwd=worker.folder, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], 30)
        assert ready and process.stdout.readline() == "now then\n"
    finally:
        process.kill()
        process.communicate()
