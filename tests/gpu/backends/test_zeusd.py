"""Zeusd: which GPU is changed, and every way in which the daemon can fail."""

import contextlib
import math
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_zeusd import FakeZeusd
from plain_reader import UUID, PlainReader

from envpipe_megatron.gpu.backends.zeusd import Zeusd, ZeusdGpu, zeusd_socket
from envpipe_megatron.gpu.base import GpuError, GpuPermissionError
from envpipe_megatron.gpu.site import SiteConfig


@pytest.fixture(autouse=True)
def _no_zeus_variables(monkeypatch):
    monkeypatch.delenv("ZEUSD_SOCK_PATH", raising=False)
    monkeypatch.delenv("ZEUSD_TOKEN", raising=False)


@pytest.fixture
def daemon(tmp_path):
    daemon = FakeZeusd(tmp_path / "zeusd.sock")
    yield daemon
    if daemon.path.exists():
        daemon.stop()


def gpu_of(daemon, pci_address="00000000:41:00.0", time_limit_s=30.0):
    gpu = ZeusdGpu(PlainReader(UUID, pci_address), SiteConfig(zeusd_socket=daemon.path))
    gpu._zeusd._time_limit_s = time_limit_s  # the host may be busy
    return gpu


def locked(mhz, gpu_id=1):
    values = {"gpu_ids": str(gpu_id), "min_clock_mhz": str(mhz), "max_clock_mhz": str(mhz)}
    return "/gpu/set_gpu_locked_clocks", values


RESET = ("/gpu/reset_gpu_locked_clocks", {"gpu_ids": "1"})


def test_the_gpu_is_found_by_its_pci_address_and_not_by_a_number(daemon):
    daemon.gpus = {"0000:41:00.0": {"id": 6}, "0001:41:00.0": {"id": 1}, "0000:41:00.1": {"id": 2}}
    gpu_of(daemon, "00000000:41:00.0").lock_frequency(1380)
    gpu_of(daemon, "00000001:41:00.0").lock_frequency(1200)
    assert daemon.changes == [locked(1380, 6), locked(1200, 1)]


def test_a_gpu_that_the_daemon_does_not_manage_is_never_touched(daemon):
    gpu = gpu_of(daemon, "00000000:99:00.0")
    with pytest.raises(GpuError, match=r"does not manage.*0000:99:00\.0"):
        gpu.lock_frequency(1380)
    assert "POST" not in " ".join(daemon.requests)


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ({"id": 0, "name": "fake"}, r"PCI addresses.*Upgrade zeusd to 0\.5"),
        ({"id": 0, "pci_address": "over there"}, "Not a PCI bus id"),
        (3, "does not answer /discover"),
        ({"id": "first", "pci_address": "0000:01:00.0"}, "does not answer /discover"),
        ({"id": None, "pci_address": "0000:01:00.0"}, "does not answer /discover"),
    ],
)
def test_a_daemon_that_tells_no_addresses_is_refused(daemon, gpu, said):
    daemon.offer = {"gpus": [gpu], "enabled_api_groups": ["gpu-control"], "auth_required": False}
    with pytest.raises(GpuError, match=said):
        gpu_of(daemon).lock_frequency(1380)
    assert daemon.requests == ["GET /discover"]


def test_a_restarted_daemon_is_asked_anew_for_its_numbers(daemon):
    gpu = gpu_of(daemon)
    gpu.lock_frequency(1380)
    daemon.gpus = {"0000:41:00.0": {"id": 0}, "0000:01:00.0": {"id": 1}}
    daemon.restart()
    gpu.lock_frequency(1200)
    assert daemon.changes == [locked(1380, 1), locked(1200, 0)]


def test_a_daemon_that_dies_within_a_request_and_comes_back(daemon):
    gpu = gpu_of(daemon)
    gpu.lock_frequency(1380)
    daemon.wait_for.clear()
    daemon.in_write.clear()
    thread = threading.Thread(target=gpu.lock_frequency, args=(1200,))
    thread.start()
    assert daemon.in_write.wait(30)
    daemon.restart()
    daemon.wait_for.set()
    thread.join(30)
    assert daemon.changes[-1] == locked(1200)


def test_a_socket_of_somebody_else(daemon, monkeypatch):
    daemon.path.chmod(0o600)
    if os.geteuid() == 0:
        # Root may write everywhere: the kernel's answer to a user is given in its stead.
        def denied(self, address):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(socket.socket, "connect", denied)
    else:
        daemon.path.chmod(0o000)
    with pytest.raises(GpuPermissionError, match="not writable by this user") as caught:
        gpu_of(daemon).lock_frequency(1380)
    assert isinstance(caught.value, GpuPermissionError)
    assert daemon.requests == []


@pytest.mark.parametrize(
    ("status", "answer", "kind", "said"),
    [
        (403, {"errors": {"1": "NVML error: no permission"}}, GpuPermissionError, "root"),
        (401, {"error": "Authentication required."}, GpuPermissionError, "ZEUSD_TOKEN"),
        (
            404,
            {"error": "not enabled"},
            GpuPermissionError,
            "0.5 or newer with --enable gpu-control",
        ),
        (400, {"errors": {"1": "NVML error: not supported"}}, GpuError, "not supported"),
        (500, {"errors": {"1": "GPU is lost", "2": "x"}}, GpuError, "GPU is lost; x"),
        (500, None, GpuError, "no reason given"),
        (500, {"errors": ["lost"], "error": "some are lost"}, GpuError, "some are lost"),
    ],
)
def test_the_drivers_reason_comes_back(daemon, status, answer, kind, said):
    gpu = gpu_of(daemon)
    gpu.lock_frequency(1380)
    daemon.fault = (status, answer)
    with pytest.raises(kind, match=said) as caught:
        gpu.lock_frequency(1200)
    assert type(caught.value) is kind
    with pytest.raises(GpuError):
        gpu.reset_frequency()
    daemon.fault = None
    gpu.reset_frequency()
    assert daemon.changes == [locked(1380), RESET]


def test_tokens(daemon, monkeypatch):
    daemon.tokens = {"good": ["gpu-control"], "poor": ["gpu-read"]}
    for token in (None, "bad", "poor"):
        if token:
            monkeypatch.setenv("ZEUSD_TOKEN", token)
        with pytest.raises(GpuPermissionError, match="ZEUSD_TOKEN"):
            gpu_of(daemon).lock_frequency(1380)
        with pytest.raises(GpuPermissionError):
            Zeusd(daemon.path).token_ends_s()
    assert daemon.changes == []
    monkeypatch.setenv("ZEUSD_TOKEN", "good")
    assert Zeusd(daemon.path).token_ends_s() == math.inf
    gpu_of(daemon).lock_frequency(1380)
    assert daemon.changes == [locked(1380)]


@pytest.mark.parametrize(("token", "good"), [("good\n", True), ("go\nod", False), ("gööd€", False)])
def test_a_token_with_characters_that_no_header_has(daemon, monkeypatch, token, good):
    """One that was read from a file may end in a line break; no log may say it."""
    daemon.tokens = {"good": ["gpu-control"]}
    monkeypatch.setenv("ZEUSD_TOKEN", token)
    outcome = contextlib.nullcontext()
    if not good:
        outcome = pytest.raises(GpuPermissionError, match=r"that no token has.*ZEUSD_TOKEN")
    with outcome as refused:
        gpu_of(daemon).lock_frequency(1380)
    assert daemon.changes == [locked(1380)] * good
    assert refused is None or token not in str(refused.value)


def test_control_ends_before_the_token_does(daemon, monkeypatch):
    assert gpu_of(daemon).control_ends_s() == math.inf
    daemon.tokens, daemon.tokens_end_s = {"good": ["gpu-control"]}, 1_900_000_000
    monkeypatch.setenv("ZEUSD_TOKEN", "good")
    assert gpu_of(daemon).control_ends_s() == 1_900_000_000 - 600


def test_an_answer_that_comes_too_late(daemon):
    gpu = gpu_of(daemon, time_limit_s=0.2)
    daemon.wait_for.clear()
    with pytest.raises(GpuError, match=r"within 0\.2 s.*may still take effect"):
        gpu.lock_frequency(1380)
    daemon.wait_for.set()
    gpu._zeusd._time_limit_s = 30.0
    gpu.lock_frequency(1200)
    assert locked(1200) in daemon.changes


def test_a_guard_waits_at_least_as_long_as_a_request_may_be_under_way(daemon):
    assert gpu_of(daemon).late_request_s == 5.0
    assert Zeusd(daemon.path)._time_limit_s == 5.0


HTML = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "closed the connection"),
        (HTML, "does not answer /discover as zeusd does"),
    ],
)
def test_what_is_no_zeusd_is_told_apart(daemon, answer, said):
    daemon.raw = answer
    with pytest.raises(GpuError, match=said):
        gpu_of(daemon).lock_frequency(1380)


def test_threads_do_not_mix_answers(daemon):
    gpus = [gpu_of(daemon), gpu_of(daemon, "0000:01:00.0")]
    gpus[1]._zeusd = gpus[0]._zeusd
    clocks = (1410, 1395, 1380, 1200) * 10
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda gpu: [gpu.lock_frequency(clock) for clock in clocks], gpus))
    for gpu_id in (0, 1):
        made = [change for change in daemon.changes if change[1]["gpu_ids"] == str(gpu_id)]
        assert made == [locked(clock, gpu_id) for clock in clocks]


def test_where_the_socket_is(monkeypatch, tmp_path):
    assert str(zeusd_socket(SiteConfig())) == "/run/zeusd/zeusd.sock"
    site = SiteConfig(zeusd_socket=tmp_path / "site.sock")
    assert zeusd_socket(site) == tmp_path / "site.sock"
    monkeypatch.setenv("ZEUSD_SOCK_PATH", str(tmp_path / "mine.sock"))
    assert zeusd_socket(site) == tmp_path / "mine.sock"
