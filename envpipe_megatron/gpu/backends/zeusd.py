"""A GPU whose clock zeusd changes: the Zeus project's daemon, which has the rights for everybody.

Requests go over its Unix socket, as its HTTP API (https://ml.energy/zeus/zeusd/api/) describes
them. All of them block: they return with the driver's error, and the daemon handles them in order.

A daemon numbers GPUs as its own NVML does, which another container need not share. So every change
has a connection to itself, on which the daemon is first asked for its GPUs, and ours is found by
PCI address; where the daemon gives no addresses (before zeusd 0.5), none is guessed. Everything is
read through the GPU's own back end.
"""

import contextlib
import http.client
import json
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from envpipe_megatron.gpu.base import GpuError, GpuPermissionError, ReadThroughGpu
from envpipe_megatron.gpu.registry import Device, VendorGpu, pci_address
from envpipe_megatron.gpu.site import SiteConfig

_DEFAULT_SOCKET = Path("/run/zeusd/zeusd.sock")
_SOCKET_VARIABLE = "ZEUSD_SOCK_PATH"
_TOKEN_VARIABLE = "ZEUSD_TOKEN"
"""The variables are Zeus's own, so that a job that uses Zeus already needs nothing more."""

CONTROL_GROUP = "gpu-control"
_REQUEST_TIME_LIMIT_S = 5.0
"""A lock takes milliseconds; without persistence mode the driver wakes a GPU for about a second."""

_LOOK_TIME_LIMIT_S = 2.0
BEFORE_TOKEN_ENDS_S = 600.0
"""A guard tries to reset for as long."""

PciAddress = tuple[int, int, int, int]
"""Domain, bus, device and function."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ZeusdOffer:
    """A daemon's answer: its numbers of GPUs, its API groups, and whether it wants a token."""

    gpu_ids: dict[PciAddress, int]
    groups: frozenset[str]
    auth_required: bool


def zeusd_socket(site: SiteConfig) -> Path:
    """Return the daemon's socket: ZEUSD_SOCK_PATH, else the site's, else Zeus's default."""
    given = os.environ.get(_SOCKET_VARIABLE)
    return Path(given) if given else site.zeusd_socket or _DEFAULT_SOCKET


class _Connection(http.client.HTTPConnection):
    # One that the daemon has closed must not reconnect unseen: the numbers of GPUs may be others.
    auto_open = 0

    def __init__(self, address: Path, time_limit_s: float) -> None:
        super().__init__("localhost", timeout=time_limit_s)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._address))


class Zeusd:
    """The daemon at a socket. Any thread may call: each call connects anew.

    All methods raise GpuPermissionError if the daemon, its socket or the driver refuses it to
    this user, and GpuError if there is no daemon, it gives no answer within `time_limit_s`, is
    none that this understands, or fails.
    """

    def __init__(self, address: Path, time_limit_s: float = _REQUEST_TIME_LIMIT_S) -> None:
        self.address = address
        self._time_limit_s = time_limit_s
        token = os.environ.get(_TOKEN_VARIABLE, "").strip()  # a file's ends in a line break
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def discover(self) -> ZeusdOffer:
        """Return what the daemon offers."""
        return self._connected(self._discover)

    def token_ends_s(self) -> float:
        """Ask a daemon that wants a token whether, and until when, ours allows to change clocks.

        Return the end on the wall clock, s since 1970.
        """
        answer = self._connected(lambda connection: self._ask(connection, "GET", "/auth/whoami"))
        scopes, end_s = answer.get("scopes"), answer.get("exp")
        if not isinstance(scopes, list) or CONTROL_GROUP not in scopes:
            raise self._no_right(f"the token allows {scopes}, not {CONTROL_GROUP}")
        return float(end_s) if isinstance(end_s, int | float) else math.inf

    def post(self, gpu: PciAddress, name: str, **values: int) -> None:
        """Have the daemon change one GPU, and return when it has; it may do so twice."""

        def change(connection: _Connection) -> None:
            gpu_id = self._discover(connection).gpu_ids.get(gpu)
            if gpu_id is None:
                raise GpuError(
                    f"Zeusd at {self.address} does not manage this GPU",
                    value="{:04x}:{:02x}:{:02x}.{:x}".format(*gpu),
                    remedy="Have zeusd see all GPUs of the machine, and restart it after changes",
                )
            query = urlencode({"gpu_ids": gpu_id, **values, "block": "true"})
            self._ask(connection, "POST", f"/gpu/{name}?{query}")

        self._connected(change)

    def _connected(self, work: Callable[[_Connection], Result], again: bool = True) -> Result:
        """Do `work` on a connection, `again` on another if it breaks, as in a restart."""
        with contextlib.closing(_Connection(self.address, self._time_limit_s)) as connection:
            try:
                connection.connect()
            except PermissionError as error:
                raise GpuPermissionError(
                    f"The socket of zeusd is not writable by this user: {self.address}",
                    remedy="Ask for access to it (zeusd's --socket-permissions, --socket-gid)",
                ) from error
            except OSError as error:
                raise GpuError(
                    f"There is no zeusd at {self.address}: {error.args[-1]}",
                    remedy=f"Start zeusd here, or set {_SOCKET_VARIABLE} or the site's "
                    "zeusd_socket",
                ) from error
            try:
                return work(connection)
            except TimeoutError as error:
                raise GpuError(
                    f"Zeusd at {self.address} did not answer within {self._time_limit_s:g} s",
                    remedy="Look at the daemon's log; the request may still take effect",
                ) from error
            except (OSError, http.client.HTTPException) as error:
                if not again:
                    raise GpuError(
                        f"Zeusd at {self.address} closed the connection: {error!r}",
                        remedy="Look whether the daemon still runs, and at its log",
                    ) from error
        return self._connected(work, again=False)

    def _ask(self, connection: _Connection, method: str, target: str) -> dict[str, Any]:
        try:
            connection.request(method, target, headers=self._headers)
        except ValueError:  # whose text has the token
            raise self._no_right("it was given characters that no token has") from None
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise self._refused(response.status, _reason(body), target)
        try:
            answer = json.loads(body or b"{}")
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._foreign(target, body)
        return answer

    def _discover(self, connection: _Connection) -> ZeusdOffer:
        answer = self._ask(connection, "GET", "/discover")
        try:
            gpus = [(int(gpu["id"]), gpu.get("pci_address")) for gpu in answer["gpus"]]
            groups = frozenset(map(str, answer["enabled_api_groups"]))
            auth_required = bool(answer["auth_required"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise self._foreign("/discover", json.dumps(answer).encode()) from error
        if any(not isinstance(address, str) for _, address in gpus):
            raise GpuError(
                f"Zeusd at {self.address} does not report the PCI addresses of its GPUs",
                remedy="Upgrade zeusd to 0.5 or newer: a number does not name a GPU safely",
            )
        gpu_ids = {pci_address(address): gpu_id for gpu_id, address in gpus}
        return ZeusdOffer(gpu_ids, groups, auth_required)

    def _refused(self, status: int, reason: str, target: str) -> GpuError:
        if status in (401, 403):
            return self._no_right(reason)
        if status == 404:
            return GpuPermissionError(
                f"Zeusd at {self.address} does not offer to change clocks: {reason}",
                remedy=f"Start zeusd 0.5 or newer with --enable {CONTROL_GROUP}",
            )
        return GpuError(
            f"Zeusd at {self.address} failed with HTTP status {status}: {reason}",
            value=target,
            remedy="Look at the daemon's log for the driver's reason",
        )

    def _no_right(self, reason: str) -> GpuPermissionError:
        return GpuPermissionError(
            f"Zeusd at {self.address} refuses: {reason}",
            remedy=f"Set {_TOKEN_VARIABLE} to a token with scope {CONTROL_GROUP} (`zeusd token "
            "issue`) where the daemon wants one; otherwise run zeusd with root's rights",
        )

    def _foreign(self, target: str, body: bytes) -> GpuError:
        return GpuError(
            f"What listens at {self.address} does not answer {target} as zeusd does",
            value=body[:200].decode(errors="replace"),
            remedy=f"Correct {_SOCKET_VARIABLE} or the site's zeusd_socket, or upgrade zeusd",
        )


def _reason(body: bytes) -> str:
    """Return the reason in an error's body: {"errors": {gpu: text}}, {"error": text}, or text."""
    text = body[:2000].decode(errors="replace").strip()
    with contextlib.suppress(ValueError):
        answer = json.loads(body)
        if isinstance(answer, dict):
            errors = answer.get("errors")
            if isinstance(errors, dict):
                return "; ".join(str(error) for error in errors.values())
            return str(answer.get("error", text))
    return text or "no reason given"


class ZeusdGpu(ReadThroughGpu):
    """One GPU under the zeusd that variables or the site name. Opening it connects to nothing.

    A process that was killed may have left a request with the daemon: see `late_request_s`. A reset
    leaves the site's `reset_range_mhz`, None for the driver's default. Raises GpuError if the
    driver does not list the GPU.
    """

    backend = "zeusd"
    late_request_s = _REQUEST_TIME_LIMIT_S

    def __init__(self, reader: VendorGpu, site: SiteConfig) -> None:
        super().__init__(reader)
        self._pci_address = pci_address(reader.device().pci_bus_id)
        self._zeusd = Zeusd(zeusd_socket(site))
        self._reset_range_mhz = site.reset_range_mhz

    @classmethod
    def rights(cls, site: SiteConfig, devices: Sequence[Device]) -> str:
        """Return the evidence that a zeusd changes clocks for this process; GpuError if not."""
        zeusd = Zeusd(zeusd_socket(site), _LOOK_TIME_LIMIT_S)
        offer = zeusd.discover()
        if CONTROL_GROUP not in offer.groups:
            raise GpuError(
                f"zeusd at {zeusd.address} offers {', '.join(sorted(offer.groups)) or 'nothing'}",
                remedy=f"Start zeusd with --enable {CONTROL_GROUP}",
            )
        if offer.auth_required and zeusd.token_ends_s() < time.time() + BEFORE_TOKEN_ENDS_S:
            raise GpuError(
                f"The token of {zeusd.address} ends within {BEFORE_TOKEN_ENDS_S / 60:g} minutes",
                remedy="Issue one that outlives the job: nothing could reset a clock after its end",
            )
        names = [device.pci_bus_id for device in devices]
        if missing := [name for name in names if pci_address(name) not in offer.gpu_ids]:
            raise GpuError(
                f"zeusd at {zeusd.address} does not manage {', '.join(missing)}",
                remedy="Have zeusd see all GPUs of the machine, and restart it after changes",
            )
        return f"zeusd at {zeusd.address} offers {CONTROL_GROUP} to this user"

    def control_ends_s(self) -> float:
        """Return an instant before the token's end, after which nothing could be reset."""
        if not self._zeusd.discover().auth_required:
            return math.inf
        return self._zeusd.token_ends_s() - BEFORE_TOKEN_ENDS_S

    def _lock(self, frequency_mhz: int) -> None:
        self._set_range(frequency_mhz, frequency_mhz)

    def _reset(self) -> None:
        if self._reset_range_mhz is None:
            self._zeusd.post(self._pci_address, "reset_gpu_locked_clocks")
        else:
            self._set_range(*self._reset_range_mhz)

    def _set_range(self, low_mhz: int, high_mhz: int) -> None:
        self._zeusd.post(
            self._pci_address,
            "set_gpu_locked_clocks",
            min_clock_mhz=low_mhz,
            max_clock_mhz=high_mhz,
        )
