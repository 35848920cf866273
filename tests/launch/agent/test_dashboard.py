"""Grafana's dashboard: by its own schema, by the exporter's families, and by a real Prometheus.

Alone: `pytest tests/launch/agent/test_dashboard.py`, with Debian's package prometheus installed.
"""

import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_ranks import LONG_S, Nodes, Rank
from free_port import free_port

from envpipe_megatron.gpu.base import PowerState
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard.messages import send
from envpipe_megatron.launch.agent.agent import NodeAgent
from envpipe_megatron.launch.agent.prometheus import FAMILIES, serve_metrics
from envpipe_megatron.launch.bill import Tariff

FOLDER = Path(__file__).parents[3] / "configs/dashboards"
DASHBOARD = json.loads((FOLDER / "envpipe.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
EXPRESSIONS = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
#: As Grafana fills them in: the job that is chosen, all nodes and stages, some scrapes.
FILLED = {"$job": "job 7", "$node": ".*", "$stage": ".*", "$__rate_interval": "2s"}
_LABEL_VALUES = re.compile(r"label_values\((?P<series>.*), (?P<label>\w+)\)")
pytestmark = pytest.mark.xdist_group("prometheus")
NEEDS_PROMETHEUS = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"
)


def filled(text: str) -> str:
    for name, value in FILLED.items():
        text = text.replace(name, value)
    assert "$" not in text
    return text


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\benvpipe_\w+", text))


def queries() -> str:
    shown = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return " ".join([*shown, *(str(variable["query"]) for variable in VARIABLES.values())])


def test_the_dashboard_has_all_metrics_that_the_exporter_serves_and_no_other():
    unasked = {f"envpipe_job_{name}_uncertainty_ratio" for name in ("saving", "slowdown")}
    unasked.add("envpipe_gpu_slowed_info")  # for watchers
    of_budgets = {name for name in FAMILIES if "_power_" in name and "_job_" in name}
    assert metrics_in(queries()) == set(FAMILIES) - unasked - of_budgets


def test_labels_of_the_dashboard_are_those_of_its_metrics():
    for selector in re.findall(r"(envpipe_\w+)\{([^}]*)\}", queries()):
        name, matchers = selector
        assert set(re.findall(r"(\w+)=", matchers)) <= set(FAMILIES[name][1])


def test_the_dashboard_is_of_grafanas_own_types():
    """Read by the types that Grafana publishes, and written again: nothing is lost or changed."""
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models import units

    register_default_plugins()
    written = JSONEncoder(sort_keys=True).encode(dashboard.Dashboard.from_json(DASHBOARD))
    assert _kept(DASHBOARD, json.loads(written)) == DASHBOARD
    known = {value for value in vars(units).values() if isinstance(value, str)}
    known |= {unit.value for unit in getattr(units, "Units", ())}
    named = re.findall(r'"unit": "(\w+)"', json.dumps(DASHBOARD))
    assert set(named) <= known


def _kept(ours: Any, written: Any) -> Any:
    """Of what was written, what ours has: the rest are defaults."""
    if isinstance(ours, dict) and isinstance(written, dict):
        return {name: _kept(ours[name], written[name]) for name in ours if name in written}
    if isinstance(ours, list) and isinstance(written, list):
        return [_kept(*both) for both in zip(ours, written, strict=False)]
    return written


class Prometheus:
    """A real one, which scrapes four times a second."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        targets = [f"127.0.0.1:{port}" for port in ports]
        text = (FOLDER / "prometheus.yml").read_text()
        text = text.replace("scrape_interval: 15s", "scrape_interval: 250ms")
        text = re.sub(r"targets: .*", f"targets: {json.dumps(targets)}", text)
        (folder / "prometheus.yml").write_text(text)
        self.url = f"127.0.0.1:{free_port()}"
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", "--log.level=error"]
        command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={self.url}"]
        self.process = subprocess.Popen(command)
        #: The instant that is asked about; None for now.
        self.asked_s: float | None = None

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(
            f"http://{self.url}/api/v1/{path}?{query}", timeout=LONG_S
        ) as a:
            return json.load(a)["data"]

    def values(self, expression: str) -> dict[str, float]:
        """Of each series, by its labels."""
        time_s = str(self.asked_s or time.time())
        found = self.ask("query", query=expression, time=time_s)["result"]
        return {json.dumps(series["metric"]): float(series["value"][1]) for series in found}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[tuple[Prometheus, list[NodeAgent]]]:
    """Two nodes of a GPU each, emulated, whose real exporters a real Prometheus has scraped."""
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    with ExitStack() as last, pytest.MonkeyPatch.context() as limited:
        limited.setattr(EmulatedGpu, "power_state", lambda gpu: PowerState((), (), 400.0))
        folder = Path(last.enter_context(TemporaryDirectory(prefix="agent-", dir="/tmp")))
        nodes = Nodes(folder, last)
        agents = [nodes.agent(f"n{number}") for number in range(2)]
        ranks = [
            nodes.rank(agent, nodes.gpu(number), number).say_hello()
            for number, agent in enumerate(agents)
        ]
        endpoint = ranks[0].collect("127.0.0.1")
        for rank in ranks:
            send(rank.connection, {"op": "send_to", "endpoint": endpoint})
        send(ranks[0].connection, {"op": "job", "facts": FACTS})
        ports = []
        for agent in agents:
            ports.append(free_port())
            serve = serve_metrics(agent, "127.0.0.1", ports[-1], "job 7", Tariff(0.25, 400.0))
            last.callback(serve)
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), ports)
        last.callback(prometheus.process.wait, LONG_S)
        last.callback(prometheus.process.terminate)
        give_up_s, iteration = time.monotonic() + LONG_S, 0
        while not _scraped(prometheus):
            assert time.monotonic() < give_up_s
            for rank in ranks:
                _train(rank, iteration)
            iteration += 1
            time.sleep(0.1)
        prometheus.asked_s = time.time()
        yield prometheus, agents


FACTS = {
    "model": "GPT, 2 layers", "level": "units", "type": "optimal", "scheduling": "1f1b",
    "reconfigure": "default", "num_gpus": 2, "tokens_per_iteration": 1024,
    "predicted": {"saving_percent": 20.0, "slowdown_percent": 0.1},
}  # fmt: skip
BASELINE = {
    "iterations": 9, "time_s": 0.5, "time_uncertainty_s": 0.001, "energy_j": 400.0,
    "metering_uncertainty_j": 0.1,
}  # fmt: skip


def _train(rank: Rank, iteration: int) -> None:
    rank.train(iteration, baseline=BASELINE)
    seen = {"requested_mhz": 1200, "observed_mhz": 1185}
    send(rank.connection, {"op": "clock", "throttle_reasons": ["power cap"], **seen})


def _scraped(prometheus: Prometheus) -> bool:
    """Return True if both nodes were, for as long as rates look back."""
    try:
        return len(prometheus.values("count_over_time(envpipe_job_tokens_total[3s]) > 11")) == 1
    except (urllib.error.URLError, ConnectionError):
        return False


@NEEDS_PROMETHEUS
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_panel_has_something_to_show(job, expression):
    found = job[0].values(filled(expression))
    assert found
    assert all(map(math.isfinite, found.values()))


@NEEDS_PROMETHEUS
def test_variables_list_what_there_is(job):
    listed = {}
    for name in ("job", "node", "stage"):
        found = _LABEL_VALUES.fullmatch(filled(VARIABLES[name]["query"]["query"]))
        assert found is not None
        listed[name] = job[0].ask(f"label/{found['label']}/values", **{"match[]": found["series"]})
    assert listed == {"job": ["job 7"], "node": ["n0", "n1"], "stage": ["0", "1"]}


@NEEDS_PROMETHEUS
def test_names_and_helps_are_as_prometheus_wants_them(job):
    ports = [target["labels"]["instance"] for target in job[0].ask("targets")["activeTargets"]]
    for port in ports:
        with urllib.request.urlopen(f"http://{port}/metrics", timeout=LONG_S) as answer:
            text = answer.read()
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
        assert (checked.returncode, checked.stderr.decode()) == (0, "")
