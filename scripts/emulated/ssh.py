"""ssh between the hosts of an emulated cluster, and from this machine, without a question or an option."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from emulated.system import ClusterError, entering, program, run, wait_for


def write_files(state: Path, addresses: dict[str, str]) -> None:
    """Keys and settings for the whole cluster: one key for root, one for all hosts' sshd.

    Args:
        state: folder of the cluster.
        addresses: of each host.
    """
    folder = state / "ssh"
    folder.mkdir(mode=0o700)
    for key in ("id_ed25519", "host_key"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "distkit-cluster", "-f", str(folder / key)])
    public = (folder / "host_key.pub").read_text(encoding="ascii")
    known = [f"{host},{address} {public}" for host, address in addresses.items()]
    (folder / "known_hosts").write_text("".join(known), encoding="ascii")
    lines = [f"Host {host}\n    HostName {address}" for host, address in addresses.items()]
    lines += [
        "Host *",
        f"    IdentityFile {folder}/id_ed25519",
        "    IdentitiesOnly yes",
        f"    UserKnownHostsFile {folder}/known_hosts",
        "    GlobalKnownHostsFile /dev/null",
        "    StrictHostKeyChecking yes",
    ]
    (state / "ssh_config").write_text("\n".join(lines) + "\n", encoding="ascii")
    (state / "sshd_config").write_text(
        "\n".join(
            [
                f"HostKey {folder}/host_key",
                f"AuthorizedKeysFile {folder}/id_ed25519.pub",
                "AuthenticationMethods publickey",
                "PermitRootLogin prohibit-password",
                # PAM would want a machine that was booted; without it, sshd refuses a root whose password is locked.
                f"UsePAM {'yes' if root_is_locked() else 'no'}",
                "StrictModes no",
                "UseDNS no",
                "PrintMotd no",
                "MaxStartups 200",
                "MaxSessions 200",
                "Subsystem sftp internal-sftp",
            ]
        )
        + "\n",
        encoding="ascii",
    )


def root_is_locked() -> bool:
    """Whether root's password is locked, in the way that sshd looks for."""
    try:
        lines = Path("/etc/shadow").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.startswith("root:!") for line in lines)


def mounts(state: Path) -> list[list[str]]:
    """What makes plain ssh work on a host: its settings in the place of the machine's, and no user's own over them."""
    commands = [
        ["mkdir", "-p", "/run/sshd"],
        ["mount", "--bind", str(state / "ssh_config"), "/etc/ssh/ssh_config"],
    ]
    user = Path("~root/.ssh").expanduser()
    if user.is_dir():
        commands.append(["mount", "-t", "tmpfs", "-o", "mode=700", "ssh", str(user)])
    return commands


def start(state: Path, host: str, pid: int, address: str) -> None:
    """Start a host's sshd, and wait until it answers on the host's own address.

    Args:
        state: folder of the cluster.
        host: its name.
        pid: process id that holds its namespaces.
        address: the only one on which it listens.
    """
    log = state / f"sshd.{host}.log"
    words = ["-f", str(state / "sshd_config"), "-E", str(log), "-o", f"ListenAddress={address}", "-o", "PidFile=none"]
    done = subprocess.run(
        [program("sshd"), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=entering(pid),
    )
    if done.returncode:
        raise ClusterError(f"sshd on {host} ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    wait_for(lambda: answers(address), 10, f"sshd on {host} (its log is {log})")


def answers(address: str) -> bool:
    """Whether an sshd is there."""
    try:
        with socket.create_connection((address, 22), timeout=2) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
