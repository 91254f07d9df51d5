"""A cable with latency: two TAP devices in two namespaces, and this program between them.

Kernels of containers and small machines often have no netem, and all have TAP. Started by scripts/cluster as
`relay.py MARK DELAY_S PID:DEVICE PID:DEVICE`; prints "ready" and runs until it is killed.
"""

from __future__ import annotations

import collections
import fcntl
import os
import select
import struct
import sys
import time
from pathlib import Path

# Started as a program of its own, so that scripts/ is not on the path yet.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from emulated.system import open_namespace, set_namespace

# From linux/if_tun.h and linux/virtio_net.h.
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 0x01, 0x02, 0x04
HEADER, LARGEST = 10, 65536 + 64
QUEUE = 4096  # frames in flight in each direction; more are dropped, as by a switch with full buffers


def tap(net: int, device: str) -> int:
    """Make a TAP device in a network namespace, and return its file.

    Frames come unsegmented, with the header that says how to segment them: up to 64 KiB in one read, not 1.5.
    """
    set_namespace(net)
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(handle, TUNSETVNETHDRSZ, struct.pack("i", HEADER))
    fcntl.ioctl(handle, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return handle


def carry(ends: list[int], delay_s: float) -> None:
    """Carry frames between the two ends, each delay_s after it came."""
    # The delay is the same for all, so those in flight stay in order.
    flying: list[collections.deque[tuple[float, bytes]]] = [collections.deque(), collections.deque()]
    while True:
        due = [queue[0][0] for queue in flying if queue]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        for handle in select.select(ends, [], [], wait)[0]:
            side = ends.index(handle)
            receive(handle, flying[1 - side], delay_s)
        now = time.monotonic()
        for handle, queue in zip(ends, flying, strict=True):
            while queue and queue[0][0] <= now:
                send(handle, queue.popleft()[1])


def receive(handle: int, queue: collections.deque[tuple[float, bytes]], delay_s: float) -> None:
    """Read what is there, but not for ever: what is due has to leave in time."""
    for _ in range(64):
        try:
            frame = os.read(handle, LARGEST)
        except BlockingIOError:
            return
        if len(queue) < QUEUE:
            queue.append((time.monotonic() + delay_s, frame))


def send(handle: int, frame: bytes) -> None:
    """Write a frame; a device that is down or full drops it."""
    try:
        os.write(handle, frame)
    except OSError:
        return


def main() -> None:
    """Make both ends and carry until killed."""
    _, _, delay, *words = sys.argv
    ends = [word.partition(":") for word in words]
    here, *nets = [open_namespace(int(pid), "net") for pid in (str(os.getpid()), *(pid for pid, _, _ in ends))]
    taps = [tap(net, device) for net, (_, _, device) in zip(nets, ends, strict=True)]
    # Not in a host's namespace, where it would be killed with the host.
    set_namespace(here)
    print("ready", flush=True)
    carry(taps, float(delay))


if __name__ == "__main__":
    main()
