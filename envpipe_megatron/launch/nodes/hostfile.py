"""The list of hosts that DeepSpeed and MPI use: `[user@]host slots=N` on each line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text

#: No leading dash: ssh would take such a host for an option.
_LINE = re.compile(
    r"(?P<target>(\w[\w.-]*@)?[\w:][\w.:-]*)"
    r"(\s+(slots=(?P<slots>0*[1-9]\d*)|max[_-]slots=\d+))*",
    re.ASCII,
)


@dataclass(frozen=True)
class Host:
    """One line of a hostfile: `host` or `user@host`, processes to start, and where it stands."""

    target: str
    slots: int | None
    where: str

    @property
    def name(self) -> str:
        """The host without a user."""
        return self.target.rpartition("@")[2]


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read the hosts, in the order of their node ranks.

    Blank lines and what follows `#` are passed over, and so is MPI's `max_slots=N`. Raises
    EnvPipeError if a line is not of that form, a host stands there twice, or there is none.
    """
    hosts: dict[str, Host] = {}
    try:
        text = read_text(path)
    except ValueError as error:
        raise EnvPipeError(f"Hostfile {path} is not readable: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        where = f"{path}:{number}"
        match = _LINE.fullmatch(words)
        if match is None:
            raise EnvPipeError(
                f"{where}: this is not a host and its number of processes",
                value=words,
                remedy="Write host slots=N or user@host slots=N, with N from 1.",
            )
        host = Host(match["target"], int(match["slots"]) if match["slots"] else None, where)
        before = hosts.setdefault(host.name.lower(), host)
        if before is not host:
            raise EnvPipeError(
                f"{host.where}: the host was named before, at {before.where}",
                value=host.name,
                remedy="Name each host once, with all of its slots.",
            )
    if not hosts:
        raise EnvPipeError(
            f"{path} names no host", remedy="Write one on each line, such as: node1 slots=8"
        )
    return tuple(hosts.values())
