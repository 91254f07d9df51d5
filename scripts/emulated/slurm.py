"""Slurm on an emulated cluster: a controller on the head, a node on each host, munge on all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from emulated import system
from emulated.system import ClusterError, name_of, run, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
DAEMONS = {"munged", "slurmctld", "slurmd", "slurmscriptd", "slurmstepd"}

# Written for Slurm 22.05, Debian 12's. cred_expire is how long a requeued job waits before it starts again (slurm.conf's
# manual; 120 s by default), and SlurmdTimeout how long a lost host goes unnoticed.
CONFIG = """\
ClusterName={name}
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=cred_expire=10
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,bf_interval=5,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
JobRequeue=1
ReturnToService=2
SlurmdTimeout=20
KillWait=10
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def write_files(state: Path, name: str, addresses: dict[str, str], cpus: int) -> None:
    """slurm.conf and munge's key.

    Args:
        state: folder of the cluster.
        name: of the cluster.
        addresses: of each host.
        cpus: of each node; more than there are is allowed.
    """
    folder = state / "slurm"
    for path in folder.glob("*"):
        if path.is_dir() and path.name != "etc":  # hosts that had Slurm before have it mounted
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
    (folder / "etc").mkdir(parents=True, exist_ok=True)
    (folder / "state").mkdir()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 // len(addresses)
    nodes = [
        f"NodeName={host} NodeAddr={address} CPUs={cpus} RealMemory={memory} State=UNKNOWN"
        for host, address in addresses.items()
    ]
    text = CONFIG.format(name=name, folder=folder, nodes="\n".join(nodes))
    (folder / "etc" / "slurm.conf").write_text(text, encoding="ascii")
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))


def start_on(state: Path, host: str, pid: int, running: set[str]) -> list[str]:
    """Start munge and Slurm's daemon on a host, without those that run.

    Args:
        state: folder of the cluster.
        host: its name; head is the controller.
        pid: process id that holds its namespaces.
        running: programs that run there.

    Returns:
        What was started.
    """
    folder = state / "slurm"
    if not Path(f"/proc/{pid}/root/etc/slurm/slurm.conf").exists() or not (folder / "etc" / "slurm.conf").samefile(
        f"/proc/{pid}/root/etc/slurm/slurm.conf"
    ):
        run(["mount", "--bind", str(folder / "etc"), "/etc/slurm"], inside=pid)
    daemon = "slurmctld" if host == "head" else "slurmd"
    started = []
    if "munged" not in running:
        run(["mkdir", "-p", "/run/munge"], inside=pid)
        files = {
            "key-file": folder / "munge.key",
            "socket": "/run/munge/munge.socket.2",
            "pid-file": "/run/munge/munged.pid",
        }
        files |= {"log-file": folder / f"munged.{host}.log", "seed-file": folder / f"munged.{host}.seed"}
        run(["munged", "--force", *(f"--{option}={path}" for option, path in files.items())], inside=pid)
        started.append("munged")
    if daemon not in running:
        run([daemon], inside=pid)
        started.append(daemon)
    return started


def living(net: int) -> list[int]:
    """Processes of Slurm in a network namespace: its daemons, and what its jobs started."""
    return [pid for pid in system.living(net) if name_of(pid) in DAEMONS or is_of_a_job(pid)]


def is_of_a_job(pid: int) -> bool:
    """Whether a process has the variable that all of a job's processes get."""
    try:
        return b"\0SLURM_JOB_ID=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def wait_until_idle(pid: int, hosts: int, log: Path) -> None:
    """Wait until the controller sees all nodes.

    Args:
        pid: process id that holds the head's namespaces.
        hosts: how many nodes there are.
        log: named in the error.
    """

    def all_idle() -> bool:
        try:
            return run(["sinfo", "-h", "-N", "-o", "%T"], inside=pid).split() == ["idle"] * hosts
        except ClusterError:
            return False  # the controller doesn't answer yet

    wait_for(all_idle, 30, f"Slurm's nodes to be idle (logs are in {log})")
