"""An ssh server on the loopback interface, which knows one key."""

import os
import select
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

_START_S = 30
_PORTS_TRIED = 5


@contextmanager
def ssh_server(folder):
    """Start one, give the `ssh` command that is let in, and end it. Skips where there is none."""
    # sshd wants to be named with its whole path.
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"))
    programs = {name: shutil.which(name, path=path) for name in ("sshd", "ssh", "ssh-keygen")}
    missing = [name for name, found in programs.items() if found is None]
    if missing:
        pytest.skip(f"there is no {' or '.join(missing)}: install openssh-server")
    for name in ("host_key", "user_key"):
        command = [programs["ssh-keygen"], "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    if os.geteuid() == 0:
        # Its service makes this folder, and sshd does not start without it.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for _ in range(_PORTS_TRIED):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server, told = _start(programs["sshd"], folder, port)
        if server is not None:
            break
    else:
        pytest.skip(f"sshd does not start here: {told}")
    try:
        yield " ".join(
            [
                programs["ssh"],
                *("-F", "none", "-p", str(port), "-i", str(folder / "user_key")),
                *("-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=no"),
                *("-o", f"UserKnownHostsFile={folder / 'known_hosts'}", "-o", "LogLevel=ERROR"),
            ]
        )
    finally:
        server.terminate()
        server.communicate()


def _start(sshd, folder, port):
    """The server when it listens, or None and what it said when it ended."""
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups 100\n"
    )
    server = subprocess.Popen(
        [sshd, "-D", "-e", "-f", config], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    told, give_up_s = b"", time.monotonic() + _START_S
    while b"Server listening on 127.0.0.1" not in told:
        ready, _, _ = select.select([server.stderr], [], [], give_up_s - time.monotonic())
        chunk = os.read(server.stderr.fileno(), 1 << 16) if ready else b""
        if not chunk:
            server.kill()
            return None, (told + server.communicate()[1]).decode(errors="replace")
        told += chunk
    return server, ""
