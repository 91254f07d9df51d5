"""The side of a host that is started from elsewhere: it ends when its launcher is gone, and says what is missing before."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distkit.errors import LaunchError
from distkit.launch.execute import show_problems
from distkit.launch.fleet import FleetRun
from distkit.launch.marked import marked
from distkit.launch.preflight import HostNeeds, check_hosts, look_here
from distkit.launch.remote import Order, mark_of
from distkit.launch.ssh import SshOptions
from distkit.launch.worker import LAUNCH_VARIABLE
from tests.launch.support import wait_until

STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"


def start(tmp_path: Path, command: list[str], mark: str, **limits: float) -> subprocess.Popen[str]:
    order = Order(
        str(tmp_path),
        tuple(command),
        {LAUNCH_VARIABLE: mark, "SAID": "yes"},
        **{"grace_s": 1.0, "silence_s": 60.0, **limits},
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "distkit.launch.remote"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(order.to_json() + "\n")
    process.stdin.flush()
    return process


def test_output_variables_and_status(tmp_path: Path) -> None:
    text = "import os; print(os.environ['SAID'], os.getcwd()); raise SystemExit(7)"
    process = start(tmp_path, [sys.executable, "-c", text], "m1")
    process.wait(60)  # with its standard input open: its end would be the launcher's
    out, err = process.communicate()
    assert out == f"yes {tmp_path}\n"
    told = [json.loads(line[len(mark_of("m1")) :]) for line in err.splitlines() if line.startswith(mark_of("m1"))]
    assert told[0] == {"alive": True} and told[-1] == {"ended": 7}


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_it_ends_all_when_the_launcher_is_gone(tmp_path: Path, how: str) -> None:
    """X6, across hosts: also what ignores SIGTERM, when the connection ends or nothing more comes over it."""
    mark = f"{os.getpid()}-{how}"
    process = start(tmp_path, [sys.executable, "-c", STUBBORN], mark, silence_s=2.0 if how == "silent" else 60.0)
    wait_until(lambda: marked(mark), 30)
    assert process.stdin is not None
    if how == "closed":
        process.stdin.close()
    process.wait(30)
    assert not marked(mark)


def test_signals_are_passed_on(tmp_path: Path) -> None:
    text = "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))\nprint('up', flush=True)\ntime.sleep(600)"
    process = start(tmp_path, [sys.executable, "-c", text], "m2")
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "up\n"
    process.stdin.write('{"signal": 10}\n')
    process.stdin.flush()
    assert process.wait(30) == 9
    process.communicate()


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    process = start(tmp_path, ["/nowhere/python"], "m3")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "'/nowhere/python' can't be started" in err and "Hint:" in err


def test_a_host_that_dies_is_lost(tmp_path: Path) -> None:
    """Its connection ends without a word; the others are ended, and the report is about the host."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\nexec {sys.executable} -m distkit.launch.remote\n")
    ssh.chmod(0o755)
    os.environ["PATH"], before = f"{tmp_path}:{os.environ['PATH']}", os.environ["PATH"]
    run = FleetRun(tmp_path / "run", ["localhost", "elsewhere"], 2, 5.0, SshOptions())
    try:
        run.start([[sys.executable, "-c", "import time; time.sleep(600)"]] * 2, [{}, {}], sys.executable)
    finally:
        os.environ["PATH"] = before
    wait_until(lambda: marked(f"{run.id}.0") and marked(f"{run.id}.1"), 30)
    run._parts[1].process.kill()
    begin = time.monotonic()
    status = run.wait()
    run.sweep()
    assert time.monotonic() - begin < 30 and status != 0
    assert run.lost == ["elsewhere"]
    (failure,) = run.failures()
    assert failure.rank == 2 and "the host was lost with ranks 2 to 3" in failure.description
    wait_until(lambda: not marked(f"{run.id}.0") and not marked(f"{run.id}.1"), 20)


def test_signs_of_life_behind_unfinished_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A progress bar redraws its line and never ends it; the host is heard all the same, and its end too."""
    monkeypatch.setattr("distkit.launch.fleet._SILENCE_S", 5.0)
    text = (
        "import sys, time\n"
        "for step in range(80): sys.stderr.write(f'\\r{step}|##'); sys.stderr.flush(); time.sleep(0.1)\n"
        "sys.stderr.write('done'); sys.stderr.flush()"
    )
    run = FleetRun(tmp_path / "run", ["localhost"], 1, 5.0, SshOptions())
    run.start([[sys.executable, "-c", text]], [{}], sys.executable)
    assert (run.wait(), run.lost, run.failures()) == (0, [], [])
    screen = capfd.readouterr().err
    assert "79|##" in screen and screen.endswith("done") and "@distkit" not in screen


def test_nobody_reads_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``distkit-run ... | head``: the ranks' text is read all the same, so that none waits for room in a pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.stdout", os.fdopen(writer, "w"))
    run = FleetRun(tmp_path / "run", ["localhost"], 1, 5.0, SshOptions())
    text = "import pathlib\nfor line in range(20000): print('line', line)\npathlib.Path('end').touch()"
    monkeypatch.chdir(tmp_path)
    run.start([[sys.executable, "-c", text]], [{}], sys.executable)
    wait_until((tmp_path / "end").exists, 20)
    assert run.wait() == 0


def test_an_agent_that_is_killed_is_named(tmp_path: Path) -> None:
    run = FleetRun(tmp_path / "run", ["localhost"], 2, 5.0, SshOptions())
    text = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    run.start([[sys.executable, "-c", text]], [{}], sys.executable)
    assert run.wait() == 137
    run.sweep()
    (failure,) = run.failures()
    assert failure.exit_status == 137 and "agent there was killed by SIGKILL" in failure.description


def needs(tmp_path: Path) -> HostNeeds:
    (tmp_path / "script.py").write_text("")
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "seen").write_text("")
    return HostNeeds(
        directory=str(tmp_path),
        target=str(tmp_path / "script.py"),
        run_dir=str(tmp_path / "run"),
        token="seen",
        nproc=2,
        cuda=False,
        interface=None,
        first="localhost",
    )


def test_nothing_is_missing_here(tmp_path: Path) -> None:
    wanted = dataclasses.replace(needs(tmp_path), interface="lo")
    assert look_here(wanted, lambda name: "10.0.0.1") == []
    assert check_hosts(["localhost"], wanted, SshOptions(), sys.executable) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"directory": "/nowhere"}, "has no folder /nowhere"),
        ({"target": "/nowhere.py"}, "has no /nowhere.py"),
        ({"token": "other"}, "doesn't see the run's folder"),
        ({"interface": "ib0"}, "has no interface ib0; it has lo"),
        ({"python": "3.1.4"}, "the launching host 3.1.4"),
        ({"packages": {"torch": "1.0"}}, "the launching host 1.0"),
        ({"cuda": True}, "has 0 visible GPUs, --nproc is 2"),
    ],
)
def test_what_is_missing(tmp_path: Path, change: dict[str, object], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (problem,) = look_here(dataclasses.replace(needs(tmp_path), **change), lambda name: "10.0.0.1")  # type: ignore[arg-type]
    assert what in problem["what"] and problem["hint"]


def test_a_name_that_leads_to_the_host_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    own = os.uname().nodename
    wanted = dataclasses.replace(needs(tmp_path), first="host0")
    (problem,) = look_here(wanted, lambda name: "127.0.1.1" if name == own else "10.0.0.1")
    assert "where no other host reaches it" in problem["what"] and "--interface" in problem["hint"]


def test_all_problems_of_all_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = check_hosts(["localhost", "nowhere.invalid"], needs(tmp_path), SshOptions(), "/nowhere/python")
    assert [problem.host for problem in found] == ["localhost", "nowhere.invalid"]
    assert found[1].away and "ssh" in found[1].what
    show_problems(found)
    assert "nowhere.invalid" in capsys.readouterr().err
    with pytest.raises(LaunchError, match="can't be written"):
        check_hosts([], dataclasses.replace(needs(tmp_path), run_dir="/proc/x"), SshOptions(), "python")
