"""An emulated cluster as a whole: made, looked at, disturbed, taken down."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from emulated import network, slurm, ssh, system
from emulated.system import MARK, ClusterError

PROGRAMS = ("ip", "tc", "bridge", "unshare", "mount", "ssh", "ssh-keygen", "sshd")


@dataclasses.dataclass
class Cluster:
    """A cluster, as its state folder has it.

    Args:
        name: of the cluster.
        count: how many hosts; they are called host0, host1 and so on. A further one, head, holds the switch and Slurm's
            controller.
        subnet: such as 10.77.0.0/24. Hosts count from .1 on, the head is .253, and this machine .254.
        bandwidth: of each host's link, in each direction, as it was typed: 1gbit, none.
        latency: from host to host, one way, as it was typed: 5ms, none.
        namespaces: inodes of the network and UTS namespace of each host, to find what lives in them.
        ready: whether it was made to the end.
        slurm_cpus: CPUs of each Slurm node; 0 while Slurm is down.
    """

    name: str
    count: int
    subnet: str = ""
    bandwidth: str = "none"
    latency: str = "none"
    namespaces: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    ready: bool = False
    slurm_cpus: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,39}", self.name):
            raise ClusterError(f"--name is {self.name!r}: letters a to z, digits and '-' make a name", "--name lab")
        if self.count < 1:
            raise ClusterError(f"--hosts is {self.count}", "--hosts 2")

    @property
    def state(self) -> Path:
        """The cluster's folder."""
        return system.base() / self.name

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts."""
        return [f"host{number}" for number in range(self.count)]

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each host, of the head, and of this machine."""
        subnet = ipaddress.IPv4Network(self.subnet)
        found = {host: str(subnet[number + 1]) for number, host in enumerate(self.hosts)}
        return {**found, "head": str(subnet[-3]), "machine": str(subnet[-2])}

    def save(self) -> None:
        """Write the state; whole or not at all."""
        draft = self.state / "cluster.json.new"
        draft.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        draft.replace(self.state / "cluster.json")

    def keepers(self) -> dict[str, int]:
        """The process that holds the namespaces of each host.

        Raises:
            ClusterError: one is gone.
        """
        found = system.marked(self.name)
        gone = [host for host in [*self.hosts, "head"] if host not in found]
        if gone or not self.ready:
            what = f"has lost {', '.join(gone)}" if self.ready else "was not made to the end"
            raise ClusterError(f"cluster {self.name} {what}", f"scripts/cluster down --name {self.name}")
        return found

    def keeper(self, host: str) -> int:
        """The process that holds the namespaces of one host."""
        if host not in (*self.hosts, "head"):
            raise ClusterError(f"cluster {self.name} has no host {host!r}; it has {', '.join([*self.hosts, 'head'])}")
        return self.keepers()[host]

    def living(self, host: str) -> list[int]:
        """Processes of a host, without the one that holds its namespaces."""
        return system.guests(self.keeper(host))


def load(name: str) -> Cluster:
    """The cluster of a name.

    Raises:
        ClusterError: there is none.
    """
    path = system.base() / name / "cluster.json"
    try:
        return Cluster(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        names = ", ".join(all_names()) or "none at all"
        raise ClusterError(
            f"there is no cluster {name}; there is {names}", f"scripts/cluster up --name {name}"
        ) from None


def all_names() -> list[str]:
    """Names of all clusters, of half-made ones too."""
    folders = {entry.name for entry in system.base().iterdir() if entry.is_dir()} if system.base().is_dir() else set()
    return sorted(folders | system.marked_clusters())


def up(wanted: Cluster) -> tuple[Cluster, bool]:
    """Make a cluster, unless it is there.

    Args:
        wanted: what to make; an empty subnet is any that is free.

    Returns:
        The cluster, and whether it was made now.

    Raises:
        ClusterError: it is there in another shape, or can't be made; then nothing of it is left.
    """
    if wanted.name in all_names():
        with_file = (system.base() / wanted.name / "cluster.json").exists()
        present = load(wanted.name) if with_file else None
        if present is not None and present.ready:
            present.keepers()
            differences = [
                f"{'hosts' if field == 'count' else field} is {getattr(present, field)}, not {getattr(wanted, field)}"
                for field in ("count", "bandwidth", "latency", "subnet")
                if getattr(wanted, field) and getattr(present, field) != getattr(wanted, field)
            ]
            if differences:
                raise ClusterError(
                    f"there is a cluster {wanted.name} already: {'; '.join(differences)}",
                    f"scripts/cluster down --name {wanted.name}   or another --name",
                )
            return present, False
        down(wanted.name)
    try:
        make(wanted)
    except BaseException:
        down(wanted.name)
        raise
    return wanted, True


def make(cluster: Cluster) -> None:
    """Make the namespaces, the network, and an sshd on each host."""
    bits_s, latency_s = network.parse_bandwidth(cluster.bandwidth), network.parse_latency(cluster.latency)
    if latency_s and not Path("/dev/net/tun").exists():
        raise ClusterError(f"--latency {cluster.latency} needs /dev/net/tun", "modprobe tun   or leave --latency out")
    subnet = network.choose_subnet(cluster.subnet or None, cluster.count)
    cluster.subnet = str(subnet)
    cluster.state.mkdir(mode=0o700, parents=True)
    cluster.save()
    addresses = cluster.addresses
    lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{address} {host}" for host, address in addresses.items())]
    (cluster.state / "hosts").write_text("\n".join(lines) + "\n", encoding="ascii")
    ssh.write_files(cluster.state, {host: addresses[host] for host in cluster.hosts})

    pids = {}
    for host in ["head", *cluster.hosts]:
        pids[host] = system.keep(f"{MARK} {cluster.name} {host}")
        cluster.namespaces[host] = [system.namespace(pids[host], kind) for kind in ("net", "uts")]
        cluster.save()
        furnish(cluster, host, pids[host])
    bits = subnet.prefixlen
    network.make_bridge(cluster.name, pids["head"], f"{addresses['head']}/{bits}", f"{addresses['machine']}/{bits}")
    for host in cluster.hosts:
        network.make_cable(cluster.name, host, pids, f"{addresses[host]}/{bits}", bits_s, latency_s)
    for host in cluster.hosts:
        ssh.start(cluster.state, host, pids[host], addresses[host])
    cluster.ready = True
    cluster.save()


def furnish(cluster: Cluster, host: str, pid: int) -> None:
    """Give a host its name, its names of others, its settings of ssh, and a /run of its own (sshd, munge, nscd)."""
    root = cluster.state / f"run.{host}"
    root.mkdir()
    commands = [["hostname", host], ["mount", "-t", "tmpfs", "-o", "mode=755", "run", str(root)]]
    if cluster.state.is_relative_to("/run"):
        # The state folder is to be seen through the new /run.
        inner = root / cluster.state.relative_to("/run")
        commands += [["mkdir", "-p", str(inner)], ["mount", "--bind", str(cluster.state), str(inner)]]
    commands += [
        ["mount", "--rbind", str(root), "/run"],
        ["mount", "--bind", str(cluster.state / "hosts"), "/etc/hosts"],
        *ssh.mounts(cluster.state),
    ]
    for command in commands:
        system.run(command, inside=pid)


def down(name: str) -> bool:
    """Take a cluster away, however much of it there is.

    Returns:
        Whether there was anything.
    """
    if name not in all_names():
        return False
    marked = system.marked(name)
    inodes = {host: [system.namespace(pid, "net"), system.namespace(pid, "uts")] for host, pid in marked.items()}
    inodes = {host: pair for host, pair in inodes.items() if not host.startswith("cable-of-")}
    folder = system.base() / name
    if (folder / "cluster.json").exists():
        # Hosts whose keeper is gone: two inodes together are not another's by accident.
        inodes = {**load(name).namespaces, **inodes}
    for host, (net, uts) in inodes.items():
        system.end(partial(system.living, net, [marked.get(host, 0)], uts), f"processes of {host}")
    network.remove(name)
    system.end(lambda: list(system.marked(name).values()), f"what holds cluster {name}")
    shutil.rmtree(folder, ignore_errors=True)
    return True


def kill(cluster: Cluster, host: str) -> int:
    """Kill all processes of a host, as a power cut does; its link and its name stay.

    Returns:
        How many there were.
    """
    return system.end(partial(system.guests, cluster.keeper(host)), f"processes of {host}")


def boot(cluster: Cluster, host: str) -> list[str]:
    """Start what a host runs by itself: sshd, and Slurm's part if Slurm is up.

    Returns:
        What was started; nothing if the host was up.
    """
    pid = cluster.keeper(host)
    running = {system.name_of(process) for process in cluster.living(host)}
    started = []
    if host != "head" and "sshd" not in running:
        ssh.start(cluster.state, host, pid, cluster.addresses[host])
        started.append("sshd")
    if cluster.slurm_cpus:
        started += slurm.start_on(cluster.state, host, pid, running)
    return started


def describe(name: str) -> dict[str, Any]:
    """A cluster in words and numbers, for tables and JSON."""
    try:
        cluster = load(name)
        pids = cluster.keepers()
    except ClusterError as error:
        return {"name": name, "state": "broken", "why": str(error), "hosts": []}
    links = network.links(pids["head"])
    hosts = []
    for host in cluster.hosts:
        living = system.guests(pids[host])
        hosts.append(
            {
                "host": host,
                "address": cluster.addresses[host],
                "state": "up" if any(system.name_of(pid) == "sshd" for pid in living) else "off",
                "link": links.get(host, "gone"),
                "processes": {pid: system.name_of(pid) for pid in living},
                **network.counters(pids[host]),
            }
        )
    facts = {"subnet": cluster.subnet, "bandwidth": cluster.bandwidth, "latency": cluster.latency}
    return {
        "name": name,
        "state": "ready",
        **facts,
        "slurm": bool(cluster.slurm_cpus),
        "folder": str(cluster.state),
        "hosts": hosts,
    }


def execute(cluster: Cluster, host: str, words: list[str]) -> None:
    """Become a command on a host. Folder and environment are kept, so status and signals are its own.

    Raises:
        ClusterError: the command isn't there.
    """
    folder = Path.cwd()
    system.enter(cluster.keeper(host))
    try:
        os.chdir(folder)
        os.execvp(words[0], words)
    except OSError as error:
        raise ClusterError(f"{error.filename or words[0]} on {host}: {error.strerror}") from None


def slurm_up(cluster: Cluster, cpus: int) -> str:
    """Start Slurm, each host a node.

    Args:
        cluster: where.
        cpus: of each node.

    Returns:
        What to tell the user.
    """
    pids = cluster.keepers()
    if cluster.slurm_cpus not in (0, cpus):
        raise ClusterError(
            f"Slurm is up with {cluster.slurm_cpus} CPUs a node, not {cpus}", "scripts/cluster slurm down"
        )
    if not cluster.slurm_cpus:
        slurm.write_files(cluster.state, cluster.name, {host: cluster.addresses[host] for host in cluster.hosts}, cpus)
        cluster.slurm_cpus = cpus
        cluster.save()
    started = [
        f"{daemon} on {host}"
        for host in ["head", *cluster.hosts]
        for daemon in slurm.start_on(
            cluster.state, host, pids[host], {system.name_of(pid) for pid in cluster.living(host)}
        )
    ]
    slurm.wait_until_idle(pids["head"], cluster.count, cluster.state / "slurm")
    return f"Slurm {'is up' if started else 'was up already'}: {cluster.count} idle nodes of {cpus} CPUs"


def slurm_down(cluster: Cluster) -> str:
    """End Slurm, and with it the jobs.

    Returns:
        What to tell the user.
    """
    if not cluster.slurm_cpus:
        return "Slurm was down already"
    for host in ["head", *cluster.hosts]:
        pid = cluster.keeper(host)
        system.end(partial(slurm.living, system.namespace(pid, "net")), f"Slurm on {host}")
    cluster.slurm_cpus = 0
    cluster.save()
    return "Slurm is down"
