"""The network of an emulated cluster: a bridge in the head's namespace, and a cable from it to each host."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import subprocess
import sys
from pathlib import Path

from emulated.system import MARK, ClusterError, run, wait_for

SUBNETS = [f"10.77.{third}.0/24" for third in range(256)]
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_latency(text: str) -> float:
    """Seconds from a text such as 5ms; "none" and "0" are 0."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if found:
        return float(found[1]) * UNITS[found[2]]
    if text in ("none", "0"):
        return 0.0
    raise ClusterError(f"--latency is {text!r}, which is no time", "--latency 5ms")


def parse_bandwidth(text: str) -> float:
    """Bits per second from a text such as 200mbit; "none" is 0, no limit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text)
    if found and float(found[1]) > 0:
        return float(found[1]) * PREFIXES[found[2]]
    if text == "none":
        return 0.0
    raise ClusterError(f"--bandwidth is {text!r}, which is no rate", "--bandwidth 1gbit")


def choose_subnet(wanted: str | None, hosts: int) -> ipaddress.IPv4Network:
    """The subnet that was asked for, or the first of 10.77.N.0/24 that nothing on this machine uses.

    Raises:
        ClusterError: it is no subnet, has no room for the hosts, or is in use.
    """
    routes = json.loads(run(["ip", "-j", "-4", "route", "show", "table", "all"]))
    used = [
        ipaddress.IPv4Network(route["dst"], strict=False)
        for route in routes
        if re.fullmatch(r"[\d.]+(/\d+)?", route["dst"]) and not route["dst"].startswith("0.0.0.0/0")
    ]
    for text in [wanted] if wanted else SUBNETS:
        try:
            subnet = ipaddress.IPv4Network(text)
        except ValueError as error:
            raise ClusterError(f"--subnet is {text!r}: {error}", "--subnet 10.77.0.0/24") from None
        if subnet.num_addresses < hosts + 4:  # the hosts, the head, this machine, and the two that nobody can have
            raise ClusterError(f"--subnet {text} has no room for {hosts} hosts and 4 more", "--subnet 10.77.0.0/24")
        if not any(subnet.overlaps(other) for other in used):
            return subnet
    raise ClusterError(
        f"this machine has a route into {wanted or 'each of 10.77.N.0/24'} already", "--subnet 10.99.7.0/24"
    )


def uplink(name: str) -> str:
    """This machine's interface into a cluster. Linux allows 15 characters, names of clusters may be longer."""
    return "dk" + hashlib.sha256(name.encode()).hexdigest()[:8]


def make_bridge(name: str, head: int, address: str, machine: str) -> None:
    """A bridge in the head's namespace, with the head's address on it, and a cable from this machine.

    The bridge isn't in this machine's own namespace, where a firewall (Docker's, for one) may drop what it forwards.

    Args:
        name: of the cluster.
        head: process id that holds the head's namespaces.
        address: of the head, as 10.77.0.253/24.
        machine: this machine's address, in the same form.
    """
    link = uplink(name)
    batch(None, [f"link add {link} type veth peer name machine netns {head}"])
    lines = [
        "link set lo up",
        "link add br0 type bridge mcast_snooping 0",
        "link set br0 addrgenmode none",
        "link set machine addrgenmode none master br0",
        "link set machine up",
        f"addr add {address} dev br0",
        "link set br0 up",
    ]
    batch(head, lines)
    batch(None, [f"link set {link} addrgenmode none", f"addr add {machine} dev {link}", f"link set {link} up"])


def make_cable(name: str, host: str, pids: dict[str, int], address: str, bits_s: float, latency_s: float) -> None:
    """Connect a host: eth0 in its namespace, and a port of the bridge that has the host's name.

    Args:
        name: of the cluster.
        host: whom to connect.
        pids: process ids that hold the namespaces of host and head.
        address: of the host, as 10.77.0.1/24.
        bits_s: bits per second, in each direction; 0 is no limit.
        latency_s: one way between two hosts; half of it is spent on each host's cable.
    """
    head, pid = pids["head"], pids[host]
    if latency_s:
        start_relay(name, host, head, pid, latency_s / 2)
    else:
        batch(head, [f"link add {host} type veth peer name eth0 netns {pid}"])
    eth0 = ["link set eth0 addrgenmode none", f"addr add {address} dev eth0", "link set eth0 up"]
    batch(pid, ["link set lo up", *eth0])
    batch(head, [f"link set {host} addrgenmode none master br0", f"link set {host} up"])
    if bits_s:
        # A millisecond's worth of bytes may go at once; a queue of 50 ms, then packets are dropped.
        limit = f"tbf rate {bits_s:.0f}bit burst {max(64 * 1024, int(bits_s / 8 / 1000))} latency 50ms"
        run(["tc", "qdisc", "replace", "dev", "eth0", "root", *limit.split()], inside=pid)
        run(["tc", "qdisc", "replace", "dev", host, "root", *limit.split()], inside=head)


def start_relay(name: str, host: str, head: int, pid: int, delay_s: float) -> None:
    """Start the program that carries packets with a delay; it makes both ends of the cable."""
    words = [sys.executable, str(Path(__file__).with_name("relay.py")), f"{MARK} {name} cable-of-{host}"]
    ends = [f"{head}:{host}", f"{pid}:eth0"]
    with subprocess.Popen(
        [*words, str(delay_s), *ends],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
    ) as relay:
        assert relay.stdout is not None
        assert relay.stderr is not None
        if relay.stdout.readline() != b"ready\n":
            raise ClusterError(f"the cable of {host} can't be made: {relay.stderr.read().decode().strip()[-300:]}")
        relay.returncode = 0  # it is to outlive this program, which doesn't wait for it


def batch(pid: int | None, lines: list[str]) -> None:
    """Run lines of ip in one process, in the namespaces of a process; None is here."""
    run(["ip", "-batch", "-"], inside=pid, text="\n".join(lines) + "\n")


def remove(name: str) -> None:
    """Take away this machine's end of the network; the rest goes with the namespaces."""
    link = uplink(name)
    if Path("/sys/class/net", link).exists():
        run(["ip", "link", "del", link])
        wait_for(lambda: not Path("/sys/class/net", link).exists(), 10, f"the end of {link}")


def set_link(head: int, host: str, up: bool) -> None:
    """Mend or cut the link of a host. Cut, the bridge drops its packets silently, both ways; the host isn't told."""
    run(["bridge", "link", "set", "dev", host, "state", "3" if up else "0"], inside=head)


def links(head: int) -> dict[str, str]:
    """Which ports of the bridge forward: "up" or "down" for each host."""
    ports = json.loads(run(["bridge", "-j", "link", "show"], inside=head) or "[]")
    return {port["ifname"]: "up" if port.get("state") == "forwarding" else "down" for port in ports}


def counters(pid: int) -> dict[str, int]:
    """Bytes and packets that passed a host's eth0, as the host sees them. What stays on the host isn't among them."""
    for line in Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines():
        device, _, rest = line.partition(":")
        if device.strip() == "eth0":
            fields = [int(field) for field in rest.split()]
            return {
                "sent_bytes": fields[8],
                "received_bytes": fields[0],
                "sent_packets": fields[9],
                "received_packets": fields[1],
            }
    return {"sent_bytes": 0, "received_bytes": 0, "sent_packets": 0, "received_packets": 0}
