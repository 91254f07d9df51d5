"""Whole launches: real agents and workers over gloo, signals, kills, and what is left afterwards."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import termios
import time

from tests.launch.support import COMMAND, Launch, wait_until

REDUCE = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "sum", int(total), "gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), sys.argv[1:])
    if dist.get_rank() == 0:
        import psutil
        family = [psutil.Process(os.getppid()), *psutil.Process(os.getppid()).children()]
        listening = [c.laddr.ip for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        print("listening", sorted(set(listening)), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""

COUNT_SIGNALS = """
    import os, signal, sys, time
    rank, counts = os.environ["RANK"], {}
    def note(number, frame):
        name = signal.Signals(number).name
        counts[name] = counts.get(name, 0) + 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, note)
    open(f"up-{rank}", "w").write(str(os.getpid()))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not {"SIGINT", "SIGTERM"} & set(counts):
        time.sleep(0.02)
    time.sleep(0.4 if rank == "0" else 1.0)
    open(f"counts-{rank}", "w").write(repr(counts))
    sys.exit(int(sys.argv[1]) if rank == "0" else 0)
"""

WAIT = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)", os.getcwd()])
    name = f"up-{rank}.new"
    open(name, "w").write(str(os.getpid()))
    os.rename(name, f"up-{rank}")
    if rank == 1:
        time.sleep(120)
    dist.barrier()
"""


def test_two_jobs_at_once_and_a_pasted_dry_run(launch: Launch) -> None:
    """X1, X2: no port is shared, nothing listens beyond loopback, and the printed line does the same run."""
    launch.script(REDUCE)
    launch.environ.update(CUDA_VISIBLE_DEVICES="1,3", PYTHONUNBUFFERED="1")  # each argument of print is a write
    words = ["-s", "ddp", "--nproc", "2", "--output", "all", "script.py", "a b", "--help"]
    other = launch.folder / "other"
    dry = launch.popen([*COMMAND, "--dry-run", "--run-dir", str(other), *words])
    line, said = dry.communicate(timeout=60)
    assert dry.returncode == 0 and not other.exists(), said
    direct = launch.start(*words)
    pasted = launch.popen(["bash", "-c", line], cwd="/")
    outputs = []
    for process in (direct, pasted):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        outputs.append(sorted(out.splitlines()))
    assert (
        outputs[0]
        == outputs[1]
        == [
            "[rank 1] rank 1 sum 2 gpus 1,3 ['a b', '--help']",
            "listening ['127.0.0.1']",
            "rank 0 sum 2 gpus 1,3 ['a b', '--help']",
        ]
    )
    assert sorted(path.name for path in (other / "logs").iterdir()) == ["rank-000.log", "rank-001.log"]


def test_the_first_failing_ranks_traceback_is_last(launch: Launch) -> None:
    """X5: not the connection error of the rank that waited for it."""
    script = launch.script("""
        import torch.distributed as dist
        dist.init_process_group("gloo")
        def fail():
            raise ValueError("boom")
        if dist.get_rank() == 1:
            fail()
        print("waiting")
        dist.barrier()
    """)
    done = launch.run("--nproc", "2", "script.py")
    assert done.returncode == 1 and done.stdout == "waiting\n"
    assert done.stderr.endswith(
        "\nTraceback (most recent call last):\n"
        f'  File "{script}", line 7, in <module>\n    fail()\n'
        f'  File "{script}", line 5, in fail\n    raise ValueError("boom")\nValueError: boom\n'
    )
    assert "rank 1 of 2 failed" in done.stderr and "  then: rank 0, " in done.stderr
    assert str(launch.run_dir / "logs" / "rank-001.log") in done.stderr
    assert done.stderr.count("Traceback") == 1 and "ValueError: boom" in launch.log(1) and "waiting" in launch.log(0)


def test_one_rank_is_killed(launch: Launch) -> None:
    """X6: the rest end, what ranks started ends with them."""
    launch.script(WAIT)
    process = launch.start("--nproc", "2", "script.py")
    pids = [int(text) for text in launch.wait_for("up-0", "up-1")]
    assert len(launch.left()) == 5  # the agent, two ranks, a child of each
    process.send_signal(signal.SIGUSR1)  # a warning that these workers don't follow changes nothing
    time.sleep(0.2)
    os.kill(pids[1], signal.SIGKILL)
    _, err = process.communicate(timeout=30)  # the grace time
    assert process.returncode == 137 and "rank 1 of 2 failed" in err and "killed by SIGKILL" in err
    wait_until(lambda: not launch.left(), 5)


def test_the_launcher_is_killed(launch: Launch) -> None:
    launch.script("import os, time; open('up-' + os.environ['RANK'], 'w').write('x'); time.sleep(120)")
    process = launch.start("--nproc", "2", "script.py")
    launch.wait_for("up-0", "up-1")
    assert len(launch.left()) == 3
    process.kill()
    wait_until(lambda: not launch.left(), 5)


def on_terminal(launch: Launch, *words: str) -> tuple[subprocess.Popen[str], int]:
    """Start in a session whose controlling terminal is ours; returns its keyboard."""
    keyboard, terminal = pty.openpty()

    def take() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = launch.start(*words, stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=take)
    os.close(terminal)
    return process, keyboard


def read_all(keyboard: int) -> str:
    text = b""
    try:
        while piece := os.read(keyboard, 4096):
            text += piece
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(keyboard)
    return text.decode()


def test_ctrl_c_once_reaches_each_worker_once(launch: Launch) -> None:
    """X7: the workers end as they like, one after the other; rank 0 still sees a terminal."""
    launch.script("import sys; print(sys.stdout.isatty(), sys.stderr.isatty(), flush=True)\n" + _dedent(COUNT_SIGNALS))
    process, keyboard = on_terminal(launch, "--nproc", "2", "script.py", "3")
    launch.wait_for("up-0", "up-1")
    os.write(keyboard, b"\x03")
    time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)  # a wrapper that forwards what the terminal has delivered already
    process.wait(60)
    assert process.returncode == 3
    assert launch.wait_for("counts-0", "counts-1") == ["{'SIGINT': 1}"] * 2
    assert "True True" in read_all(keyboard)


def test_ctrl_c_twice_ends_now(launch: Launch) -> None:
    """X7: also workers that ignore it; nothing is left."""
    launch.script("""
        import os, signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        open("up-" + os.environ["RANK"], "w").write("x")
        time.sleep(120)
    """)
    process, keyboard = on_terminal(launch, "--nproc", "2", "script.py")
    launch.wait_for("up-0", "up-1")
    os.write(keyboard, b"\x03")
    time.sleep(0.6)
    assert process.poll() is None and len(launch.left()) == 3
    os.write(keyboard, b"\x03")
    process.wait(30)
    assert process.returncode == 130 and not launch.left()
    assert "stopped by Ctrl-C (SIGINT); the processes were killed" in read_all(keyboard)


def test_sigterm_and_a_warning_signal_are_forwarded_and_the_grace_time_kept(launch: Launch) -> None:
    """A script without handlers ends by SIGTERM itself; one that ignores it is killed."""
    launch.script(COUNT_SIGNALS, "polite.py")
    launch.script(
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("deaf-" + os.environ["RANK"], "w").write("x")
        time.sleep(120)
    """,
        "deaf.py",
    )
    polite = launch.start("--nproc", "2", "polite.py", "0")
    deaf = launch.start("--nproc", "1", "--set", "timeouts.grace_s=1", "deaf.py", run_dir=launch.folder / "deaf")
    launch.wait_for("up-0", "up-1", "deaf-0")
    polite.send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    assert polite.poll() is None
    for process in (polite, deaf):
        process.send_signal(signal.SIGTERM)
    assert polite.wait(60) == 0
    assert launch.wait_for("counts-0", "counts-1") == ["{'SIGUSR1': 1, 'SIGTERM': 1}"] * 2
    assert deaf.wait(60) == 143
    assert not launch.left()


def test_scripts_end_on_signals(launch: Launch) -> None:
    """Without handlers, and with one for the warning signal that takes its time; the ranks don't disturb each other."""
    launch.script("""
        import os, signal, sys, time
        run, rank = os.environ["RUN"], os.environ["RANK"]
        def save(number, frame):
            time.sleep(int(rank))
            open(f"saved-{rank}", "w").write("x")
            sys.exit(128 + number)
        if run == "u":
            signal.signal(signal.SIGUSR1, save)
        open(f"up-{run}{rank}", "w").write("x")
        time.sleep(200)
    """)
    runs = []
    for name, number in (("i", signal.SIGINT), ("t", signal.SIGTERM), ("u", signal.SIGUSR1)):
        environ = {**launch.environ, "RUN": name}
        words = ["--nproc", "2", "--max-restarts", "1", "script.py"]
        runs.append((name, number, launch.start(*words, run_dir=launch.folder / name, env=environ)))
    for name, number, process in runs:
        launch.wait_for(f"up-{name}0", f"up-{name}1")
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number, err
        assert "stopped by" in err and "failed" not in err and "Traceback" not in err
    assert (launch.folder / "saved-0").exists() and (launch.folder / "saved-1").exists()


def test_restarts(launch: Launch) -> None:
    """All ranks start again, meet again, and each failed attempt is reported."""
    launch.script("""
        import os
        import torch.distributed as dist
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        open(f"port-{attempt}", "w").write(os.environ["MASTER_PORT"])
        dist.init_process_group("gloo")
        print("attempt", attempt, flush=True)
        if attempt == 0 and dist.get_rank() == 1:
            raise ValueError("first attempt")
        dist.barrier()
        dist.destroy_process_group()
    """)
    done = launch.run("--nproc", "2", "--max-restarts", "1", "script.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "attempt 0\nattempt 1\n"
    first, second = launch.wait_for("port-0", "port-1")
    assert first != second  # in the old store a rank may find an address of the first attempt
    assert "rank 1 of 2 failed" in done.stderr and "all ranks start again (restart 1 of 1)" in done.stderr
    assert launch.log(1).count("---- rank 1 of 2") == 2
    assert not list((launch.run_dir / "logs").glob("error-*"))


def test_two_nodes_by_hand(launch: Launch) -> None:
    """X4 and a failure on one node: the other one ends too and shows the cause."""
    launch.script("""
        import os, sys, time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        print("rank", dist.get_rank(), "of", dist.get_world_size(), "node", os.environ["GROUP_RANK"], flush=True)
        dist.barrier()
        if dist.get_rank() == 2:
            raise ValueError("on the second node")
        time.sleep(200)
    """)
    words = ["--nnodes", "2", "--nproc", "2", "--master-addr", "127.0.0.1", "--master-port", "0", "--output", "all"]
    words[7] = str(free_port())
    nodes = [launch.start(*words, "--node-rank", str(rank), "script.py") for rank in range(2)]
    ended = [process.communicate(timeout=120) for process in nodes]
    assert "2 nodes x 2 processes = 4" in ended[0][1] and "rank 0 of 4 node 0" in ended[0][0]
    for process, (_, err) in zip(nodes, ended, strict=True):
        assert process.returncode == 1
        assert "rank 2 of 4 failed" in err and err.endswith("ValueError: on the second node\n")
    assert not launch.left()


def test_the_nodes_port_is_taken(launch: Launch) -> None:
    import socket

    launch.script("")
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        words = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        done = launch.run(*words, "script.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        f"distkit-run: the nodes were to meet at port {port} of this host, but another process listens there",
        f"Hint: --master-port {port + 1}   on every host",
    ]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _dedent(text: str) -> str:
    import textwrap

    return textwrap.dedent(text)
