"""The emulated cluster itself: what the other tests of this folder rely on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.emulated import SCRIPT, EmulatedCluster, clusters

PROBE = Path(__file__).with_name("probe.py")


def measure(cluster: EmulatedCluster, size: int) -> dict[str, float]:
    """Round trip and rate between host0 and host1, and the bytes that both links counted meanwhile."""
    before = cluster.counters()
    with cluster.start("host1", sys.executable, PROBE, "serve") as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        found: dict[str, float] = json.loads(cluster.exec("host0", sys.executable, PROBE, "host1", size).stdout)
    after = cluster.counters()
    assert found["bytes"] == size
    found["sent_by_host0"] = after["host0"]["sent_bytes"] - before["host0"]["sent_bytes"]
    found["received_by_host1"] = after["host1"]["received_bytes"] - before["host1"]["received_bytes"]
    found["sent_by_host1"] = after["host1"]["sent_bytes"] - before["host1"]["sent_bytes"]
    return found


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def test_names(cluster: EmulatedCluster) -> None:
    code = "import socket; print(socket.gethostname(), *map(socket.gethostbyname, ['host0', 'host1', 'localhost']))"
    facts = cluster.facts()
    addresses = [host["address"] for host in facts["hosts"]]
    for host in cluster.hosts:
        words = cluster.exec(host, sys.executable, "-c", code).stdout.split()
        assert words == [host, *addresses, "127.0.0.1"]


def test_ssh_asks_nothing(cluster: EmulatedCluster) -> None:
    """Plain ssh both ways, to itself, by address, and from this machine: launchers give it no options."""
    for here, there in [("host0", "host1"), ("host1", "host0"), ("host0", "host0")]:
        done = cluster.exec(here, "ssh", there, "hostname; cat /etc/hosts")
        assert done.stdout.split()[0] == there
        assert "host1" in done.stdout
        assert done.stderr == ""
    facts = cluster.facts()
    assert cluster.exec("host0", "ssh", facts["hosts"][1]["address"], "hostname").stdout == "host1\n"
    line = ["ssh", "-F", f"{facts['folder']}/ssh_config", "host1", "hostname"]
    assert subprocess.run(line, capture_output=True, text=True, timeout=30).stdout == "host1\n"


def test_pdsh(cluster: EmulatedCluster) -> None:
    done = cluster.exec("host0", "pdsh", "-R", "ssh", "-w", "host0,host1", "hostname")
    assert sorted(done.stdout.splitlines()) == ["host0: host0", "host1: host1"]


def test_exec_becomes_the_command(cluster: EmulatedCluster, tmp_path: Path) -> None:
    assert cluster.exec("host0", "sh", "-c", "exit 7", check=False).returncode == 7
    done = cluster.exec("host1", "sh", "-c", 'pwd; echo "$COLOUR"', cwd=tmp_path, env={"COLOUR": "green"})
    assert done.stdout.splitlines() == [str(tmp_path), "green"]
    with cluster.start("host0", "sh", "-c", "echo $$; exec sleep 60") as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        assert cluster.programs("host0") == {process.pid: ["sleep", "60"]}
        assert cluster.programs("host1") == {}
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
    refused = cluster.exec("host0", "no-such-program", check=False)
    assert refused.returncode == 1
    assert "no-such-program on host0: No such file" in refused.stderr


def test_counters(cluster: EmulatedCluster) -> None:
    found = measure(cluster, 20_000_000)
    # Headers of Ethernet, IP and TCP are 66 bytes in 1514 at most; veth doesn't even cut a stream into frames.
    assert 20_000_000 < found["sent_by_host0"] < 21_500_000
    assert 20_000_000 < found["received_by_host1"] < 21_500_000
    assert found["sent_by_host1"] < 1_000_000


def test_bandwidth_and_latency(slow_cluster: EmulatedCluster) -> None:
    found = measure(slow_cluster, 10_000_000)
    # The lower bound of time is the link's; the upper one leaves room for a busy machine.
    assert 0.010 <= found["trip_s"] < 0.1
    assert 10e6 < found["bits_s"] < 210e6
    assert 10_000_000 < found["sent_by_host0"] < 11_500_000
    # Both ends of a cable that a program carries can be cut too.
    slow_cluster.link("host1", up=False)
    assert slow_cluster.exec("host0", "ssh", "-o", "ConnectTimeout=2", "host1", "true", check=False).returncode == 255


def test_link_is_cut_and_mended(cluster: EmulatedCluster) -> None:
    with cluster.start("host0", "ssh", "host1", "read line; echo got $line", stdin=subprocess.PIPE) as session:
        assert session.stdin is not None
        assert session.stdout is not None
        until(lambda: bool(cluster.programs("host1")))
        cluster.link("host1", up=False)
        assert [host["link"] for host in cluster.facts()["hosts"]] == ["up", "down"]
        session.stdin.write("word\n")
        session.stdin.flush()
        assert cluster.exec("host0", "ssh", "-o", "ConnectTimeout=2", "host1", "true", check=False).returncode == 255
        assert session.poll() is None  # nobody told it
        cluster.link("host1", up=True)
        assert session.stdout.readline() == "got word\n"  # TCP sends it again
        assert session.wait(10) == 0
    refused = cluster.command("link", "head", "down", check=False)
    assert refused.returncode == 1
    assert "host0, host1" in refused.stderr


def test_kill_and_boot(cluster: EmulatedCluster) -> None:
    daemon = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(300)"
    cluster.exec("host1", "ssh", "host1", sys.executable, "-c", f"'{daemon}' < /dev/null > /dev/null 2>&1")
    with cluster.start("host1", "sleep", 300) as on_host1, cluster.start("host0", "sleep", 300) as on_host0:
        until(lambda: len(cluster.programs("host1")) == 2)
        cluster.kill("host1")
        assert on_host1.wait(10) == -signal.SIGKILL
        assert on_host0.poll() is None
        states = {host["host"]: (host["state"], len(host["processes"])) for host in cluster.facts()["hosts"]}
        assert states == {"host0": ("up", 2), "host1": ("off", 0)}
        on_host0.kill()
    assert cluster.exec("host0", "ssh", "host1", "true", check=False).returncode == 255
    cluster.boot("host1")
    assert cluster.exec("host0", "ssh", "host1", "hostname").stdout == "host1\n"
    assert "was up already" in cluster.command("boot", "host1").stdout


def test_up_and_down_twice(cluster: EmulatedCluster) -> None:
    address = cluster.facts()["hosts"][0]["address"]
    again = cluster.command("up", *cluster.shape)
    assert f"was up already: host0 {address}" in again.stdout
    other = cluster.command("up", "--hosts", "3", "--latency", "2ms", check=False)
    assert other.returncode == 1
    assert "hosts is 2, not 3; latency is none, not 2ms" in other.stderr
    assert "Hint: scripts/cluster down --name" in other.stderr

    second = EmulatedCluster("-second", hosts=3)
    with second:
        assert second.facts()["subnet"] != cluster.facts()["subnet"]
        taken = EmulatedCluster("-third").command("up", "--subnet", cluster.facts()["subnet"], check=False)
        assert "has a route into" in taken.stderr
        assert second.exec("host0", "ssh", "host2", "hostname").stdout == "host2\n"
    assert second.name not in [found["name"] for found in clusters()]
    assert "there is none" in second.command("down").stdout
    assert cluster.exec("host0", "hostname").stdout == "host0\n"


def marked(name: str) -> list[int]:
    """Processes that a cluster is held together by, or its `up` under way."""
    words = subprocess.run(["pgrep", "-f", f"^distkit-cluster {name} "], capture_output=True, text=True).stdout
    return [int(word) for word in words.split()]


def test_half_made_is_cleaned(root: None, one_at_a_time: None) -> None:
    """`up` is killed with -9 at several moments; another one mends that, and `down` leaves nothing."""
    half = EmulatedCluster("-half", latency="1ms")
    for moment in (0.4, 0.2, 0.0):
        line = [str(SCRIPT), "up", "--name", half.name, *half.shape]
        with subprocess.Popen(line, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            before = marked(half.name)
            until(lambda before=before: bool(set(marked(half.name)) - set(before)))
            time.sleep(moment)
            process.kill()
    assert half.facts()["state"] == "broken"
    with half:
        assert half.exec("host0", "ssh", "host1", "hostname").stdout == "host1\n"
        # What holds a host is gone, and what runs on it isn't.
        folder = Path(half.facts()["folder"])
        with half.start("host1", "sleep", 300) as orphan:
            until(lambda: bool(half.programs("host1")))
            keeper = subprocess.run(
                ["pgrep", "-f", f"^distkit-cluster {half.name} host1"], capture_output=True, text=True
            )
            subprocess.run(["kill", "-9", keeper.stdout.strip()], check=True)
            until(lambda: half.facts()["state"] == "broken")
            assert "has lost host1" in half.command("exec", "host0", "true", check=False).stderr
            half.command("down")
            assert orphan.wait(10) == -signal.SIGKILL
    assert marked(half.name) == []
    assert not folder.exists()


def test_bad_words(root: None) -> None:
    half = EmulatedCluster("-never")
    for words, said in [
        (["--bandwidth", "fast"], "Hint: --bandwidth 1gbit"),
        (["--latency", "5"], "Hint: --latency 5ms"),
        (["--hosts", "0"], "--hosts is 0"),
        (["--subnet", "10.77.0.0/30"], "has no room for 2 hosts"),
    ]:
        refused = half.command("up", *words, check=False)
        assert refused.returncode == 1
        assert said in refused.stderr
    assert half.name not in [found["name"] for found in clusters()]


@pytest.mark.slow
def test_slurm(cluster: EmulatedCluster, tmp_path: Path) -> None:
    with cluster.slurm(cpus=8):
        assert sorted(cluster.exec("host0", "srun", "-N2", "hostname").stdout.split()) == cluster.hosts
        assert cluster.exec("host1", "sinfo", "-h", "-o", "%D %c %T").stdout == "2 8 idle\n"
        script = tmp_path / "job.sh"
        script.write_text(
            "#!/bin/bash\ntrap 'scontrol requeue $SLURM_JOB_ID; exit 0' USR1\n"
            "echo round ${SLURM_RESTART_COUNT:-0} on $(srun hostname | sort)\n"
            "[ ${SLURM_RESTART_COUNT:-0} -gt 0 ] && exit 0\nsleep 300 & wait\n"
        )
        out = tmp_path / "out"
        options = ["--parsable", "-N2", "-n2", "-t1", "--open-mode=append", f"--output={out}"]
        job = cluster.exec("host0", "sbatch", *options, script).stdout.strip()
        until(lambda: out.exists() and "round 0 on host0 host1" in out.read_text())
        cluster.exec("host0", "scancel", "--batch", "--signal=USR1", job)
        until(lambda: "round 1 on host0 host1" in out.read_text(), 60)
        # A node that is lost and comes back.
        cluster.kill("host1")
        cluster.boot("host1")
        until(lambda: cluster.exec("host0", "sinfo", "-h", "-o", "%D %T").stdout == "2 idle\n")
        assert sorted(cluster.exec("host0", "srun", "-N2", "hostname").stdout.split()) == cluster.hosts
    assert {name for host in cluster.facts()["hosts"] for name in host["processes"].values()} == {"sshd"}
