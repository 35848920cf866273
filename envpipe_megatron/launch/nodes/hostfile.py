"""The list of hosts that MPI and DeepSpeed use: `[user@]host slots=N`, or `host:N`, a line each.

The second is MPICH's and Intel MPI's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text

_SLOTS, _MOST = r"(0*[1-9]\d*)", r"(\s+max[_-]slots=\d+)*"
#: No leading dash: ssh would take such a host for an option. Two colons: an IPv6 address.
_LINE = re.compile(
    r"(?P<user>\w[\w.-]*@)?(\[(?P<address>[\w.]*:[\w.:]*)\]|(?P<host>\w[\w.-]*|[\w.]*(:[\w.]*){2,}))"
    rf"(:(?P<colon>{_SLOTS})|{_MOST}\s+slots=(?P<slots>{_SLOTS}))?{_MOST}",
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
    EnvPipeError if a line is not of these forms, a host is there twice, or there is none.
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
        host = _read_line(words, f"{path}:{number}")
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


def _read_line(words: str, where: str) -> Host:
    if match := _LINE.fullmatch(words):
        host, slots = match["address"] or match["host"], match["colon"] or match["slots"]
        # The end of a bare address may be meant as a number of processes.
        is_clear = match["address"] or slots or not _is_address(host.rpartition(":")[0])
        if ":" not in host or (is_clear and _is_address(host)):
            return Host((match["user"] or "") + host, int(slots) if slots else None, where)
    raise EnvPipeError(
        f"{where}: this is not a host and its number of processes",
        value=words,
        remedy="Write host slots=N, host:N or [IPv6 address]:N, with N from 1.",
    )


def _is_address(text: str) -> bool:
    try:
        return bool(IPv6Address(text))
    except ValueError:
        return False
