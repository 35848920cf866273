"""An ssh server that knows one key; each connection has one of its own, and none listens."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def ssh_command(folder):
    """The `ssh` command that is let in, as text. Skips where there is no server."""
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
    config = folder / "sshd_config"
    config.write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\n"
        "UsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    return (
        f"{programs['ssh']} -F none -o 'ProxyCommand={programs['sshd']} -i -f {config}' "
        f"-i {folder}/user_key -o IdentitiesOnly=yes -o StrictHostKeyChecking=no "
        f"-o UserKnownHostsFile={folder}/known_hosts -o LogLevel=ERROR"
    )
