"""Networks of Linux namespaces: nodes that reach each other over one switch, and nothing else."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

INTERFACE = "eth0"
_PREFIX = "envpipe-test"
_COMMAND_S = 30.0


def _ip(*words: str) -> str:
    return subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=_COMMAND_S
    ).stdout


@dataclass(frozen=True)
class Host:
    """A namespace with loopback and one interface, whose other end is `port` of `switch`."""

    namespace: str
    address: str
    port: str
    switch: str

    @property
    def inside(self) -> list[str]:
        """Return the command that runs its arguments here."""
        return ["ip", "netns", "exec", self.namespace]

    @property
    def place(self) -> dict[str, Any]:
        """Of a node that is here, as `whole_nodes.Node` takes it."""
        return {"address": self.address, "interface": INTERFACE, "inside": self.inside}

    def cut(self) -> None:
        """Pull the plug."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def mend(self) -> None:
        """Put it in again."""
        _ip("-n", self.switch, "link", "set", self.port, "up")


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[list[Host]]:
    """Hosts on a bridge in a namespace of its own; nothing of them is left behind."""
    _delete_stale()
    name = f"{_PREFIX}-{os.getpid()}"
    switch = f"{name}-switch"
    hosts = [
        Host(f"{name}-{index}", f"10.77.0.{index + 1}", f"port{index}", switch)
        for index in range(num_hosts)
    ]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in hosts:
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            pair = "type", "veth", "peer", "name", INTERFACE, "netns", host.namespace
            _ip("-n", switch, "link", "add", host.port, *pair)
            _ip("-n", switch, "link", "set", host.port, "master", "bridge", "up")
            address = f"{host.address}/24", "dev", INTERFACE
            _ip("-n", host.namespace, "address", "add", *address)
            _ip("-n", host.namespace, "link", "set", INTERFACE, "up")
        yield hosts
    finally:
        _delete(f"{name}-")


@cache
def why_not() -> str:
    """Why there can be no such network here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (iproute2)"
    try:
        with network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.strip()}"


def needs_namespaces() -> pytest.MarkDecorator:
    """Skip where there can be no such network."""
    return pytest.mark.skipif(bool(why_not()), reason=why_not())


def _delete_stale() -> None:
    """Delete what tests left that were killed."""
    for line in _ip("netns", "list").splitlines():
        found = re.match(rf"({_PREFIX}-(\d+)-)", line)
        if found and not Path(f"/proc/{found[2]}").exists():
            _delete(found[1])


def _delete(prefix: str) -> None:
    """Delete namespaces by the beginning of their names, and with them their interfaces."""
    for line in _ip("netns", "list").splitlines():
        if line.startswith(prefix):
            with contextlib.suppress(subprocess.CalledProcessError):  # somebody else was faster
                _ip("netns", "delete", line.split()[0])
