"""What an emulated cluster takes from the kernel: namespaces, processes, programs, a lock."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

MARK = "distkit-cluster"
# What a host has of its own. Process ids and all folders but /run are shared: runs need shared storage, and programs
# that put process ids into names of files under /tmp stay apart.
KINDS = ("net", "uts", "mnt")
PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "bridge": "iproute2",
    "unshare": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
}
SEARCH = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"

_libc = ctypes.CDLL(None, use_errno=True)


class ClusterError(Exception):
    """Something that the user can mend.

    Args:
        message: what was wanted and what was found.
        hint: the line to type.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def program(name: str) -> str:
    """The path of a program; those of administrators are found without being on PATH."""
    found = shutil.which(name, path=SEARCH)
    if found is None:
        raise ClusterError(f"{name} is not installed", f"apt-get install {PACKAGES.get(name, name)}")
    return found


def require(*programs: str) -> None:
    """Root, and programs.

    Raises:
        ClusterError: not root, or programs are missing, all in one line.
    """
    if os.geteuid() != 0:
        raise ClusterError(
            f"an emulated cluster needs root for network namespaces, and this is user {os.geteuid()}",
            "sudo scripts/cluster ...",
        )
    missing = [name for name in programs if shutil.which(name, path=SEARCH) is None]
    if missing:
        packages = sorted({PACKAGES[name] for name in missing})
        raise ClusterError(f"not installed: {', '.join(missing)}", f"apt-get install {' '.join(packages)}")


def run(words: Sequence[str], inside: int | None = None, text: str | None = None) -> str:
    """What a program prints.

    Args:
        words: the program and its arguments.
        inside: process id whose namespaces it runs in; None is here.
        text: its standard input.

    Raises:
        ClusterError: it fails.
    """
    done = subprocess.run(
        [program(words[0]), *words[1:]],
        input=text if text is not None else "",
        capture_output=True,
        text=True,
        preexec_fn=entering(inside) if inside is not None else None,
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ClusterError(f"{' '.join(words)} ended with status {done.returncode}: {'; '.join(said[-3:])}")
    return done.stdout


def entering(pid: int) -> Callable[[], None]:
    """For subprocess: what puts a child into the namespaces of a process."""
    return lambda: enter(pid)


def enter(pid: int) -> None:
    """Go into the namespaces of a process; the current folder becomes /."""
    # All are opened before the first is entered: /proc could be another one afterwards.
    for handle in [open_namespace(pid, kind) for kind in KINDS]:
        set_namespace(handle)
        os.close(handle)


def open_namespace(pid: int, kind: str) -> int:
    """A file that stands for a namespace of a process."""
    return os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def set_namespace(handle: int) -> None:
    """Go into one namespace. (os.setns is there from Python 3.12 on.)"""
    if _libc.setns(handle, 0):
        raise OSError(ctypes.get_errno(), "setns")


def keep(mark: str) -> int:
    """Start the process that holds a host's namespaces; it sleeps until it is killed.

    Args:
        mark: its name in the list of processes, by which it is found again.

    Returns:
        Its process id.
    """
    words = ["--net", "--uts", "--mount", "--propagation", "slave", "--", "bash", "-c", 'exec -a "$0" sleep infinity']
    with subprocess.Popen(
        [program("unshare"), *words, mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    ) as keeper:
        wait_for(lambda: arguments(keeper.pid)[:1] == [mark] or keeper.poll() is not None, 10, f"namespaces of {mark}")
        status = keeper.poll()
        if status is not None:
            raise ClusterError(
                f"unshare ended with status {status}: the kernel, or the container that this is, grants no namespaces",
                "docker run --privileged ...",
            )
        keeper.returncode = 0  # it is to outlive this program, which doesn't wait for it
    return keeper.pid


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something is so.

    Raises:
        ClusterError: it isn't within that time.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise ClusterError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.01)


def arguments(pid: int) -> list[str]:
    """The command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def name_of(pid: int) -> str:
    """The program of a process, in 15 characters."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def pids() -> list[int]:
    """All processes that this process sees."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def namespace(pid: int, kind: str) -> int:
    """The inode of a namespace of a process; 0 if it is gone."""
    try:
        return Path(f"/proc/{pid}/ns/{kind}").stat().st_ino
    except OSError:
        return 0


def owner(pid: int) -> int:
    """The user that a process runs as; -1 if it is gone."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1


def marked(name: str) -> dict[str, int]:
    """Processes that hold a cluster together: what each is called, such as host0, and its process id."""
    found = {}
    for pid in pids():
        for word in arguments(pid):
            mark, _, rest = word.partition(" ")
            cluster, _, what = rest.partition(" ")
            if mark == MARK and cluster == name and what and owner(pid) == 0:
                found[what] = pid
    return found


def marked_clusters() -> set[str]:
    """Names of all clusters that processes belong to, with and without a state folder."""
    words = (word.split(" ") for pid in pids() for word in arguments(pid)[:8])
    return {parts[1] for parts in words if len(parts) >= 3 and parts[0] == MARK}


def living(net: int, but: Iterable[int] = (), uts: int | None = None) -> list[int]:
    """Processes in a network namespace, given by inode; with uts, only those that share that one too."""
    leave = set(but)
    found = [pid for pid in pids() if pid not in leave and namespace(pid, "net") == net]
    return [pid for pid in found if uts is None or namespace(pid, "uts") == uts]


def guests(keeper: int) -> list[int]:
    """Processes of a host, without the one that holds its namespaces."""
    return living(namespace(keeper, "net"), but=[keeper])


def end(find: Callable[[], list[int]], what: str) -> int:
    """Kill all processes that a function finds, until it finds none, as a process may start another meanwhile.

    Returns:
        How many there were.
    """
    killed: set[int] = set()

    def none_left() -> bool:
        found = find()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        return not found

    wait_for(none_left, 20, f"the end of {what}")
    return len(killed)


def base() -> Path:
    """The folder that the state of all clusters is in."""
    if os.access("/run", os.W_OK):
        return Path("/run", MARK)
    return Path(os.environ.get("TMPDIR", "/tmp"), MARK)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One change of a cluster at a time on this machine. The folder of all clusters is the lock; it goes when empty."""
    while True:
        base().mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(base(), os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Whoever held it before may have removed it.
            if base().exists() and os.fstat(handle).st_ino == base().stat().st_ino:
                break
            os.close(handle)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            base().rmdir()
        os.close(handle)
