"""A GPU whose clock zeusd changes: the Zeus project's daemon, which has the rights for everybody.

Requests go over its Unix socket, as its HTTP API (https://ml.energy/zeus/zeusd/api/) describes
them, on one connection that is kept open: a request is with the daemon a few tens of microseconds
after it was made. The package `zeus` has a client too, with many dependencies and no retry; the API
is small and documented, so none is needed. Blocking requests are used throughout: they come back
with the driver's error, and the daemon works them off in order.

A daemon numbers GPUs as its own NVML does, which another container need not share. On every new
connection the daemon is asked for its GPUs, and ours is found by PCI address; where the daemon does
not tell addresses (before zeusd 0.5), none is guessed. Everything is read through NVML.
"""

import contextlib
import http.client
import json
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from envpipe_megatron.gpu.backends.read_through import ReadThroughGpu
from envpipe_megatron.gpu.base import Gpu, GpuError, GpuPermissionError
from envpipe_megatron.gpu.site import SiteConfig
from envpipe_megatron.gpu.visible_devices import pci_address

DEFAULT_SOCKET = Path("/run/zeusd/zeusd.sock")
SOCKET_VARIABLE = "ZEUSD_SOCK_PATH"
TOKEN_VARIABLE = "ZEUSD_TOKEN"
"""The variables are Zeus's own, so that a job that uses Zeus already needs nothing more."""

CONTROL_GROUP = "gpu-control"
REQUEST_TIME_LIMIT_S = 5.0
"""A lock takes milliseconds; without persistence mode the driver wakes a GPU for about a second."""


PciAddress = tuple[int, int, int, int]
"""Domain, bus, device and function."""


class ZeusdError(GpuError):
    """Zeusd cannot do it: not there, too old, another set of GPUs, or the driver failed."""


class ZeusdPermissionError(ZeusdError, GpuPermissionError):
    """Zeusd, or its socket, does not let this user change clocks."""


@dataclass(frozen=True, slots=True)
class ZeusdOffer:
    """What a daemon says about itself.

    Attributes:
        gpu_ids: the daemon's number of each GPU, by PCI address.
        groups: the API groups that it offers.
        auth_required: whether it wants a token.
    """

    gpu_ids: dict[PciAddress, int]
    groups: frozenset[str]
    auth_required: bool


def zeusd_socket(site: SiteConfig) -> Path:
    """Return the daemon's socket: ZEUSD_SOCK_PATH, else the site's, else Zeus's default."""
    given = os.environ.get(SOCKET_VARIABLE)
    return Path(given) if given else site.zeusd_socket or DEFAULT_SOCKET


class _UnixConnection(http.client.HTTPConnection):
    # A connection that the daemon has closed must not come back unseen: see `_connected`.
    auto_open = 0

    def __init__(self, path: Path, time_limit_s: float) -> None:
        super().__init__("localhost", timeout=time_limit_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class ZeusdConnection:
    """A kept connection to a daemon; any thread may use it, one request at a time.

    Args:
        path: the daemon's Unix socket.
        time_limit_s: how long the daemon may take for one answer, s.
    """

    def __init__(self, path: Path, time_limit_s: float = REQUEST_TIME_LIMIT_S) -> None:
        self.path = path
        self._time_limit_s = time_limit_s
        token = os.environ.get(TOKEN_VARIABLE)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http: _UnixConnection | None = None
        self._offer: ZeusdOffer | None = None
        self._one_at_a_time = threading.Lock()

    def discover(self) -> ZeusdOffer:
        """Return what the daemon that this connection reaches offers.

        Raises:
            ZeusdError: no daemon, or none that this understands.
        """
        with self._one_at_a_time:
            return self._connected()

    def check_token(self) -> None:
        """Ask a daemon that wants a token whether ours allows to change clocks.

        Raises:
            ZeusdPermissionError: it does not.
            ZeusdError: no daemon, or none that this understands.
        """
        with self._one_at_a_time:
            self._connected()
            try:
                scopes = self._answer("GET", "/auth/whoami").get("scopes")
            except _GoneError as error:
                raise self._gone(error.reason) from error
        if not isinstance(scopes, list) or CONTROL_GROUP not in scopes:
            raise self._no_right(f"the token allows {scopes}, not {CONTROL_GROUP}")

    def post(self, gpu: PciAddress, name: str, **values: int) -> None:
        """Have the daemon change one GPU, and return when it has.

        A request on a connection that turns out to be closed, as after a pause or a restart of the
        daemon, is made once more on a new one: all of them may be made twice.

        Raises:
            ZeusdPermissionError: the daemon or the driver refuses it to us.
            ZeusdError: no daemon, no such GPU, no answer in time, or the driver failed.
        """
        with self._one_at_a_time:
            reused = self._http is not None
            try:
                self._post_once(gpu, name, values)
            except _GoneError as error:
                if not reused:
                    raise self._gone(error.reason) from error
                try:
                    self._post_once(gpu, name, values)
                except _GoneError as again:
                    raise self._gone(again.reason) from again

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._http is not None:
            self._http.close()
        self._http = self._offer = None

    def _post_once(self, gpu: PciAddress, name: str, values: dict[str, int]) -> None:
        gpu_id = self._connected().gpu_ids.get(gpu)
        if gpu_id is None:
            raise ZeusdError(
                f"Zeusd at {self.path} does not manage this GPU",
                value="{:04x}:{:02x}:{:02x}.{:x}".format(*gpu),
                remedy="Have zeusd see all GPUs of the machine, and restart it after changes",
            )
        query = urlencode({"gpu_ids": gpu_id, **values, "block": "true"})
        self._answer("POST", f"/gpu/{name}?{query}")

    def _connected(self) -> ZeusdOffer:
        """Return the daemon's offer, asked for anew on every new connection."""
        if self._http is None or self._offer is None:
            self.close()
            self._http = _UnixConnection(self.path, self._time_limit_s)
            try:
                self._http.connect()
            except OSError as error:
                self.close()
                raise self._unreachable(error) from error
            try:
                self._offer = self._parse_offer(self._answer("GET", "/discover"))
            except _GoneError as error:
                raise self._gone(error.reason) from error
        return self._offer

    def _answer(self, method: str, target: str) -> dict[str, Any]:
        assert self._http is not None
        try:
            self._http.request(method, target, headers=self._headers)
            response = self._http.getresponse()
            body = response.read()
        except TimeoutError as error:
            # Its late answer would be taken for that to the next request.
            self.close()
            raise ZeusdError(
                f"Zeusd at {self.path} did not answer within {self._time_limit_s:g} s: {target}",
                remedy="Look at the daemon's log; the request may still take effect",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _GoneError(str(error) or type(error).__name__) from error
        if response.status != 200:
            raise self._refused(response.status, _said(body), target)
        if not body:
            return {}
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._foreign(target, body)
        return answer

    def _parse_offer(self, answer: dict[str, Any]) -> ZeusdOffer:
        try:
            gpus = [(gpu["id"], gpu.get("pci_address")) for gpu in answer["gpus"]]
            groups = frozenset(answer["enabled_api_groups"])
            auth_required = bool(answer["auth_required"])
        except (KeyError, TypeError, AttributeError) as error:
            raise self._foreign("/discover", json.dumps(answer).encode()) from error
        if any(not isinstance(address, str) for _, address in gpus):
            raise ZeusdError(
                f"Zeusd at {self.path} does not tell the PCI addresses of its GPUs",
                remedy="Upgrade zeusd to 0.5 or newer: its numbers alone do not name a GPU safely",
            )
        return ZeusdOffer(
            {pci_address(address): int(gpu_id) for gpu_id, address in gpus},
            groups,
            auth_required,
        )

    # --- errors ---------------------------------------------------------------------------------

    def _refused(self, status: int, said: str, target: str) -> ZeusdError:
        if status in (401, 403):
            return self._no_right(said)
        if status == 404:
            return ZeusdPermissionError(
                f"Zeusd at {self.path} does not offer to change clocks: {said}",
                remedy=f"Start zeusd with --enable {CONTROL_GROUP}",
            )
        return ZeusdError(
            f"Zeusd at {self.path} failed with HTTP status {status}: {said}",
            value=target,
            remedy="Look at the daemon's log for the driver's reason",
        )

    def _no_right(self, said: str) -> ZeusdPermissionError:
        return ZeusdPermissionError(
            f"Zeusd at {self.path} refuses: {said}",
            remedy=f"Set {TOKEN_VARIABLE} to a token with scope {CONTROL_GROUP} (`zeusd token "
            "issue`) where the daemon wants one; otherwise run zeusd with root's rights",
        )

    def _unreachable(self, error: OSError) -> ZeusdError:
        if isinstance(error, PermissionError):
            return ZeusdPermissionError(
                f"The socket of zeusd is not writable by this user: {self.path}",
                remedy="Ask for access to the socket (zeusd's --socket-permissions, --socket-gid)",
            )
        return ZeusdError(
            f"There is no zeusd at {self.path}: {error.strerror or error}",
            remedy=f"Start zeusd, or set {SOCKET_VARIABLE} or the site's zeusd_socket",
        )

    def _gone(self, reason: str) -> ZeusdError:
        return ZeusdError(
            f"Zeusd at {self.path} closed the connection: {reason}",
            remedy="Look whether the daemon still runs, and at its log",
        )

    def _foreign(self, target: str, body: bytes) -> ZeusdError:
        return ZeusdError(
            f"What listens at {self.path} does not answer {target} as zeusd does",
            value=body[:200].decode(errors="replace"),
            remedy=f"Correct {SOCKET_VARIABLE} or the site's zeusd_socket, or upgrade zeusd",
        )


class _GoneError(Exception):
    """The connection broke; another may work."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _said(body: bytes) -> str:
    """The reason in an error's body: {"errors": {gpu: text}}, {"error": text}, or text."""
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
    """One GPU under zeusd. Opening it connects to nothing.

    A process that was killed may have left a request with the daemon: see `late_request_s`.

    Args:
        reader: the GPU to read from.
        pci_bus_id: the GPU's, as NVML tells it.
        connection: to the daemon.
        reset_range_mhz: lowest and highest SM clock in MHz that a reset leaves, None for the
            driver's default.

    Raises:
        GpuError: the PCI bus id is not one.
    """

    late_request_s = REQUEST_TIME_LIMIT_S

    def __init__(
        self,
        reader: Gpu,
        pci_bus_id: str,
        connection: ZeusdConnection,
        reset_range_mhz: tuple[int, int] | None = None,
    ) -> None:
        super().__init__("zeusd", reader)
        self._pci_address = pci_address(pci_bus_id)
        self._connection = connection
        self._reset_range_mhz = reset_range_mhz

    def _lock(self, frequency_mhz: int) -> None:
        self._set_range(frequency_mhz, frequency_mhz)
        self._requested_mhz = frequency_mhz

    def _reset(self) -> None:
        if self._reset_range_mhz is None:
            self._connection.post(self._pci_address, "reset_gpu_locked_clocks")
        else:
            self._set_range(*self._reset_range_mhz)
        self._requested_mhz = None

    def _set_range(self, low_mhz: int, high_mhz: int) -> None:
        self._connection.post(
            self._pci_address,
            "set_gpu_locked_clocks",
            min_clock_mhz=low_mhz,
            max_clock_mhz=high_mhz,
        )
