"""The command that starts a node of a hostfile through the system's ssh client."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.nodes.hostfile import Host

#: Variables of this environment that a node gets; PET_ are torchrun's own.
CARRIED_PREFIXES = ("ENVPIPE_", "NCCL_", "GLOO_", "CUDA_", "TORCH_", "OMP_", "MKL_", "PET_")
CARRIED_NAMES = ("PYTHONPATH", "LD_LIBRARY_PATH")
#: These are of one machine alone.
_NOT_CARRIED = ("ENVPIPE_AGENT_SOCKET", "CUDA_VISIBLE_DEVICES")

#: No questions for passwords, an end when the host does not answer, and no shared connection that
#: would stay in the background with our pipes. Options that the user gives come first, and win.
_SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=30"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "ControlMaster=no"),
)


def carried_environment(environ: Mapping[str, str], exported: Sequence[str]) -> dict[str, str]:
    """Return the variables that a node gets from this environment, `exported` ones among them.

    Raises EnvPipeError if a name to export is not set here.
    """
    for name in exported:
        if name not in environ:
            raise EnvPipeError(
                "--export names a variable that is not set here",
                value=name,
                remedy="Give a name alone, and set the variable before.",
            )
    return {
        name: value
        for name, value in environ.items()
        if name in exported
        or (
            name not in _NOT_CARRIED
            and (name in CARRIED_NAMES or name.startswith(CARRIED_PREFIXES))
        )
    }


def ssh_command(
    ssh: str,
    host: Host,
    arguments: Sequence[str],
    *,
    python: str,
    folder: Path,
    environ: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the words that start `envpipe launch` on a host.

    Args:
        ssh: the client and options of it, as a shell would read them; EnvPipeError if one cannot.
        arguments: those of `envpipe launch` there.
        python: the Python there.
        folder: the folder to run in there.
        environ: variables to set there.
    """
    try:
        client = shlex.split(ssh)
    except ValueError as error:
        raise EnvPipeError(f"--ssh is not a command: {error}", value=ssh) from error
    if not client:
        raise EnvPipeError("--ssh is empty", remedy="Leave it out for the system's ssh.")
    assignments = [f"{name}={value}" for name, value in sorted(environ.items())]
    words = ["env", *assignments, python, "-m", "envpipe_megatron.cli", "launch", *arguments]
    # The node takes the shell's place, and its exit status is the connection's.
    there = f"cd {shlex.quote(str(folder))} && exec {shlex.join(words)}"
    return (*client, *_SSH_OPTIONS, host.target, there)
