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

_NUMBER = r"0*[1-9]\d*"
#: No leading dash: ssh would take such a host for an option. Two colons: an IPv6 address.
_LINE = re.compile(
    r"(?P<user>\w[\w.-]*@)?"
    rf"((\[(?P<address>[\w.:]+)\]|(?P<name>\w[\w.-]*))(:(?P<slots>{_NUMBER}))?"
    r"|(?P<open_address>[\w.]*(:[\w.]*){2,}))"
    rf"(\s+(slots={_NUMBER}|max[_-]slots=\d+))*",
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
    found = _LINE.fullmatch(words)
    parts = found.groupdict() if found else {}
    address = parts.get("address") or parts.get("open_address")
    slots = [*filter(None, [parts.get("slots")]), *re.findall(rf"\sslots=({_NUMBER})", words)]
    wrong = ""
    if not found or (address and not _is_address(address)):
        wrong = "this is not a host and its number of processes"
    elif len(slots) > 1:
        wrong = "the number of processes is there more than once"
    elif parts["open_address"] and not slots:
        shorter, _, last = parts["open_address"].rpartition(":")
        if last.isdecimal() and _is_address(shorter):
            wrong = "the end of this IPv6 address may be a number of processes"
    if wrong:
        raise EnvPipeError(
            f"{where}: {wrong}",
            value=words,
            remedy="Write host slots=N, host:N or [IPv6 address]:N, with N from 1.",
        )
    target = (parts["user"] or "") + (address or parts["name"])
    return Host(target, int(slots[0]) if slots else None, where)


def _is_address(text: str) -> bool:
    try:
        return bool(IPv6Address(text))
    except ValueError:
        return False
