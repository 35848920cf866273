"""Live figures of a node for Prometheus."""

import io
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from socketserver import BaseServer
from types import SimpleNamespace
from typing import Any

import pytest
from energy_lines import job, parsed, window
from fake_gpu import FakeGpu, look_until
from free_port import free_port
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.guard.lease import Lease, list_leases
from envpipe_megatron.gpu.guard.messages import ProcessIdentity
from envpipe_megatron.gpu.registry import open_gpu
from envpipe_megatron.launch.agent import prometheus
from envpipe_megatron.launch.agent.ledger import GpuLedger
from envpipe_megatron.launch.agent.prometheus import FAMILIES, serve_metrics, with_control
from envpipe_megatron.launch.bill import Tariff
from envpipe_megatron.launch.node import NodeSettings

LONG_S = 120.0


class PoweredGpu(FakeGpu):
    """A GPU that can be asked for its power, and lost."""

    lost = False

    @property
    def power_w(self) -> float:
        assert self.driver.wait(LONG_S)
        if self.lost:
            raise GpuError("GPU is lost")
        return 250.0


class Scraped:
    """A node whose figures are told, and a scraper."""

    def __init__(self, last: ExitStack) -> None:
        self._last = last
        self.ledgers: list[GpuLedger] = []
        self.agent: Any = SimpleNamespace(
            gpus=SimpleNamespace(ledgers=lambda: self.ledgers),
            connected=lambda: ["rank 0", "rank 1"],
            log=SimpleNamespace(node='n"0\\'),
            control=None,
            bill=None,
        )

    def add_gpu(self, rank: int) -> PoweredGpu:
        gpu = PoweredGpu(observed_mhz=1410)
        labels = {"gpu": "fake", "gpu_uid": f"GPU-{rank}", "rank": rank, "stage": 2, "run": "x"}
        self.ledgers.append(GpuLedger(gpu, labels, lambda line: None))
        return gpu

    def serve(self, address: str = "127.0.0.1") -> tuple[int, Callable[[], None]]:
        port = free_port()
        end = serve_metrics(self.agent, address, port, "j", Tariff(0.36, 36.0))
        self._last.callback(end)
        return port, end

    @staticmethod
    def text(port: int, host: str = "127.0.0.1") -> str:
        url = f"http://{host}:{port}/metrics"
        with urllib.request.urlopen(url, timeout=LONG_S) as answer:
            return answer.read().decode()

    def scrape(self, port: int) -> dict[str, Metric]:
        return {family.name: family for family in text_string_to_metric_families(self.text(port))}


@pytest.fixture
def node(monkeypatch) -> Iterator[Scraped]:
    # How often a server looks whether it should end.
    monkeypatch.setattr(BaseServer.serve_forever, "__defaults__", (0.01,))
    with ExitStack() as last:
        yield Scraped(last)


def values(family: Metric) -> dict[str, float]:
    """Of each GPU, by its rank."""
    return {sample.labels["rank"]: sample.value for sample in family.samples}


def test_figures_of_each_gpu(node):
    gpus = [node.add_gpu(rank) for rank in range(2)]
    for rank, gpu in enumerate(gpus):
        gpu.now_s = 1.0 + rank
        node.ledgers[rank].bill_up_to(node.ledgers[rank].read())
    port, _ = node.serve()
    families = node.scrape(port)
    assert set(families) == {name.removesuffix("_total") for name in FAMILIES}
    power, clock, energy, ranks = (families[name] for name in (
        "envpipe_gpu_power_watts", "envpipe_gpu_sm_clock_hertz", "envpipe_gpu_energy_joules",
        "envpipe_node_ranks",
    ))  # fmt: skip
    assert [family.type for family in (power, clock, energy, ranks)] == [
        "gauge", "gauge", "counter", "gauge"
    ]  # fmt: skip
    assert all(family.documentation for family in families.values())
    assert values(power) == {"0": 250, "1": 250}
    assert values(clock) == {"0": 1.41e9, "1": 1.41e9}
    assert values(energy) == pytest.approx({"0": 100, "1": 200})
    assert {sample.name for sample in energy.samples} == {"envpipe_gpu_energy_joules_total"}
    assert power.samples[1].labels == {
        "job_name": "j", "node": 'n"0\\', "gpu": "fake", "gpu_uid": "GPU-1", "rank": "1",
        "stage": "2",
    }  # fmt: skip
    assert [(s.labels, s.value) for s in ranks.samples] == [({"job_name": "j", "node": 'n"0\\'}, 2)]
    text = node.text(port)
    for name in ("envpipe_gpu_power_watts", "envpipe_gpu_energy_joules_total"):
        assert f"# HELP {name} " in text
        assert f"# TYPE {name} " in text


def test_a_gpu_that_a_job_may_slow_is_marked(node, tmp_path, monkeypatch):
    monkeypatch.setenv("ENVPIPE_LEASE_DIR", str(tmp_path / "leases"))
    node.add_gpu(0)
    node.add_gpu(1)
    port, _ = node.serve()
    rank = ProcessIdentity.own()
    leases = [
        Lease.take(GpuAddress("nvml", uid), "j", rank=rank, open_gpu=open_gpu, clocks_mhz=(1410, 9))
        for uid in ("GPU-1", "GPU-of-another-job")
    ]
    (sample,) = node.scrape(port)["envpipe_gpu_slowed_info"].samples
    labels, mark = sample.labels, list_leases()[0].mark
    assert (sample.value, labels["gpu_uid"], labels["rank"]) == (1, "GPU-1", "1")
    names = ("user", "pid", "host", "slurm_job_id", "highest_mhz", "lowest_mhz", "created")
    assert {name: labels[name] for name in names} == {name: str(mark[name]) for name in names}
    for lease in leases:
        lease.close()  # as if its guard had died
    assert not node.scrape(port)["envpipe_gpu_slowed_info"].samples
    (tmp_path / "leases").chmod(0o777)
    assert node.scrape(port)["envpipe_gpu_power_watts"].samples


def test_figures_of_the_job(node):
    """Of the bill: 0.36 and 36 g of CO2 for a kWh, so 1 J costs 1e-7 and takes 1e-5 g."""
    port, _ = node.serve()
    node.agent.bill = bill = Bill()
    assert not node.scrape(port)["envpipe_job_tokens"].samples
    baseline = {"iterations": 9, "time_s": 0.5, "time_uncertainty_s": None,
                "energy_j": 100, "metering_uncertainty_j": 1}  # fmt: skip
    trained = window(0, 0, 800, last_iteration=9, duration_s=5, baseline=baseline)
    facts = {"model": "GPT", "level": "units", "num_gpus": 2, "tokens_per_iteration": 40,
             "predicted": {"saving_percent": 25.0}}  # fmt: skip
    for line in parsed([job(**facts), trained]):
        bill.add(line)
    families = node.scrape(port)
    found = {
        (name.removeprefix("envpipe_job_"), *list(sample.labels.values())[1:]): sample.value
        for name, family in families.items()
        for sample in family.samples
        if name.startswith("envpipe_job_")
    }
    assert found == pytest.approx({
        ("info", "units", "GPT", "", "", ""): 1, ("gpus", "billed"): 1, ("gpus", "expected"): 2,
        ("iterations",): 10, ("tokens",): 400, ("energy_joules",): 800, ("token_joules",): 2,
        ("cost",): 8e-5, ("co2_grams",): 8e-3, ("saving_ratio", "predicted"): 0.25,
        ("saving_ratio", "measured"): 0.2, ("slowdown_ratio", "measured"): 0,
    })  # fmt: skip
    for other in ({**trained, "phase": "steady m2"}, job(tokens_per_iteration=80)):
        node.agent.bill = Bill(parsed([job(**facts), trained, other]))
        families = node.scrape(port)  # batches of two sizes: nobody knows the tokens
        assert not families["envpipe_job_tokens"].samples


def test_a_gpu_that_cannot_be_read_takes_no_others_figures_away(node):
    gpus = [node.add_gpu(rank) for rank in range(3)]
    port, _ = node.serve()
    gpus[1].lost = True
    gpus[1].error = GpuError("GPU is lost")
    families = node.scrape(port)
    assert set(values(families["envpipe_gpu_power_watts"])) == {"0", "2"}
    assert set(values(families["envpipe_gpu_sm_clock_hertz"])) == {"0", "2"}
    assert set(values(families["envpipe_gpu_energy_joules"])) == {"0", "1", "2"}
    gpus[1].lost = False
    assert set(values(node.scrape(port)["envpipe_gpu_power_watts"])) == {"0", "1", "2"}


def test_a_driver_that_hangs_takes_no_other_figures_away_and_is_asked_once(node, monkeypatch):
    gpus = [node.add_gpu(rank) for rank in range(2)]
    port, _ = node.serve()
    gpus[1].driver.clear()
    monkeypatch.setattr(prometheus, "_DRIVERS_S", 0.01)
    node.scrape(port)  # asks, and does not wait for long
    monkeypatch.setattr(prometheus, "_DRIVERS_S", LONG_S)
    look_until(lambda: {*values(node.scrape(port)["envpipe_gpu_power_watts"])} == {"0"})
    assert {*values(node.scrape(port)["envpipe_gpu_energy_joules"])} == {"0", "1"}
    gpus[1].driver.set()
    look_until(lambda: len(values(node.scrape(port)["envpipe_gpu_power_watts"])) == 2)


def test_figures_are_told_to_this_machine_alone_unless_asked_for(node):
    assert NodeSettings.prometheus_address == "127.0.0.1"
    assert NodeSettings.prometheus_port is None
    another = "127.0.0.2"  # is this machine too, on every network
    port, _ = node.serve()
    node.text(port)
    with pytest.raises(OSError, match="refused"):
        node.text(port, another)
    open_port, _ = node.serve("0.0.0.0")
    for host in ("127.0.0.1", another):
        node.text(open_port, host)


def test_a_place_that_is_taken_or_none_is_an_error_that_names_it(node):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address, at in (("127.0.0.1", port), ("203.0.113.1", 0), ("no such host.invalid", 0)):
            with pytest.raises(EnvPipeError, match=rf"{address}:{at}.*--prometheus-port"):
                serve_metrics(node.agent, address, at, "j", Tariff())


def test_ending_frees_the_port(node):
    port, end = node.serve()
    end()
    with socket.create_server(("127.0.0.1", port)):
        pass
    with pytest.raises(OSError, match="refused"):
        node.text(port)


# --- /control -------------------------------------------------------------------------------------

JSON = "application/json"


def ask(port: int, body: str | None = None, kind: str = JSON, method: str = "PUT") -> Any:
    """The status and the answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/control")
    if body is not None:
        request = urllib.request.Request(
            request.full_url, body.encode(), {"Content-Type": kind}, method=method
        )
    try:
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)["error"]


def test_an_operator_asks_by_http_what_the_jobs_file_says(node, tmp_path):
    port, _ = node.serve()
    node.agent.bill = object()
    assert ask(port)[0] == 404
    file = tmp_path / "control.json"
    begun = {"power_budget": 300, "off": False}
    node.agent.control = {"file": str(file), "asked": begun}
    where = {"file": str(file)}
    assert ask(port) == (200, begun | where)
    wanted = {"power_budget": "80%", "off": True}
    assert ask(port, json.dumps(wanted)) == (200, wanted | where)
    assert json.loads(file.read_text()) == wanted
    assert ask(port) == (200, wanted | where)
    for body, what in (
        ("[", "not readable JSON"),
        ('{"of": true}', "unknown field"),
        ('{"power_budget": "800%"}', "at full clock"),
    ):
        status, said = ask(port, body)
        assert (status, what in said) == (400, True)
    assert ask(port, "{}", "text/plain")[0] == 403
    assert ask(port, " " * 5000 + "{}")[0] == 400
    assert json.loads(file.read_text()) == wanted, "nothing that is refused changes it"
    assert ask(port, "{}", method="POST") == (200, {"power_budget": None, "off": False} | where)
    for broken in (b"[", b'{"off": "\xe9"}'):
        file.write_bytes(broken)
        assert ask(port)[0] == 400
    node.agent.control["file"] = str(tmp_path / "no folder" / "control.json")
    assert ask(port, "{}")[0] == 404
    node.agent.bill = None
    assert "rank 0" in ask(port)[1], "another node's agent has the bill"
    assert "envpipe_job_info" in node.text(port)


@pytest.mark.parametrize(
    ("peer", "host", "status"),
    [
        ("127.0.0.1", "localhost:9400", 200),
        ("::1", "[::1]:9400", 200),
        ("::ffff:127.0.0.1", "127.0.0.1:9400", 200),
        ("10.0.0.7", "127.0.0.1:9400", 403),
        ("127.0.0.1", "a-page-that-was.elsewhere:9400", 403),
        ("127.0.0.1", "[::1", 400),
    ],
)
def test_only_this_node_may_ask(node, tmp_path, peer, host, status):
    file = tmp_path / "control.json"
    node.agent.bill, node.agent.control = object(), {"file": str(file), "asked": {}}
    app, seen = with_control(lambda *call: [], node.agent), []
    about = {"CONTENT_TYPE": JSON, "CONTENT_LENGTH": "2", "wsgi.input": io.BytesIO(b"{}")}
    about |= {"PATH_INFO": "/control", "REQUEST_METHOD": "PUT", "REMOTE_ADDR": peer}
    about["HTTP_HOST"] = host
    app(about, lambda said, headers: seen.append(int(said[:3])))
    assert seen == [status]
    assert file.exists() == (status == 200)
    for length in ("-1", "9" * 5000):  # is not waited for
        app(about | {"CONTENT_LENGTH": length}, lambda said, headers: None)
    app(about | {"REQUEST_METHOD": "GET"}, lambda said, headers: seen.append(int(said[:3])))
    assert seen[1] == 200
