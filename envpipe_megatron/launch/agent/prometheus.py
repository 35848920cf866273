"""Live figures of a node, and on the node of rank 0 of the job, in Prometheus' text format.

`FAMILIES` has them all; configs/dashboards/envpipe.json shows them in Grafana. `/control` beside
them shows and sets what is asked of the running job, by the job's own `control.json`: it is written
down in one place, and survives a restart.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text, replace_files
from envpipe_megatron.formats.account import Tariff
from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.wishes import parse_wishes
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.launch.agent.agent import NodeAgent
from envpipe_megatron.launch.agent.ledger import GpuLedger

_App: TypeAlias = Callable[..., Iterable[bytes]]
_JSON, _MOST_BYTES = "application/json", 4096
_REFUSED: dict[type[Exception], str] = {
    FileNotFoundError: "404 Not Found",
    PermissionError: "403 Forbidden",
}

_JOB = ("job_name",)
_NODE = (*_JOB, "node")
_OF_LEDGER = ("gpu", "gpu_uid", "rank", "stage")
_GPU = (*_NODE, *_OF_LEDGER)
#: Of a mark what names who slows a GPU and between which clocks, as labels.
_SLOWED = ("user", "pid", "host", "slurm_job_id", "highest_mhz", "lowest_mhz", "created")
#: How long to wait for the answers of all GPUs' drivers.
_DRIVERS_S = 1.0
_ABOUT = ("model", "level", "type", "scheduling", "reconfigure")

#: Of each family its help and its labels; one whose name ends in `_total` is a counter.
FAMILIES = {
    "envpipe_gpu_power_watts": ("Power now.", _GPU),
    "envpipe_gpu_power_limit_watts": ("The power limit that is enforced now.", _GPU),
    "envpipe_gpu_energy_joules_total": ("Energy in the bill of the GPU's node.", _GPU),
    "envpipe_gpu_sm_clock_hertz": ("SM clock now, or at its rank's last look.", _GPU),
    "envpipe_gpu_sm_clock_requested_hertz": (
        "SM clock that was requested then; none where the driver chooses.",
        _GPU,
    ),
    "envpipe_gpu_slowed_info": (
        "1 while EnvPipe may slow the GPU: who, for which job, between which clocks, since when.",
        (*_GPU, *_SLOWED),
    ),
    "envpipe_gpu_throttle_seconds_total": (
        "Time in which the SM clock was held back, by looks at it twice a second.",
        (*_GPU, "reason"),
    ),
    "envpipe_gpu_training_seconds_total": (
        "Time of training, by what the GPU did: units, waits for other stages, or the rest.",
        (*_GPU, "spent"),
    ),
    "envpipe_gpu_phase_info": ("The phase that the GPU's last line is of; 1.", (*_GPU, "phase")),
    "envpipe_gpu_iteration_seconds": ("Time of an iteration in the last line.", _GPU),
    "envpipe_gpu_iteration_joules": ("Energy of an iteration on the GPU in the last line.", _GPU),
    "envpipe_node_ranks": ("Ranks of this node that train.", _NODE),
    "envpipe_job_info": ("What the job says of itself; 1.", (*_JOB, *_ABOUT)),
    "envpipe_job_gpus": ("GPUs that have sent energy, and those that are to.", (*_JOB, "state")),
    "envpipe_job_iterations_total": ("Iterations of training; a repeated one counts once.", _JOB),
    "envpipe_job_tokens_total": ("Tokens of those, where all batches have one size.", _JOB),
    "envpipe_job_energy_joules_total": ("Energy of all GPUs in the job's bill.", _JOB),
    "envpipe_job_token_joules": ("Energy of a token, of all energy in the bill.", _JOB),
    "envpipe_job_cost_total": ("Cost of that energy, in the currency of --price.", _JOB),
    "envpipe_job_co2_grams_total": ("CO2 of that energy, by --grid-intensity.", _JOB),
    "envpipe_job_saving_ratio": (
        "Energy that an iteration saves of the baseline's, as the plan predicts and as measured.",
        (*_JOB, "source"),
    ),
    "envpipe_job_saving_uncertainty_ratio": ("Standard uncertainty of what was measured.", _JOB),
    "envpipe_job_slowdown_ratio": (
        "By how much of the baseline's time an iteration is slower; below 0 it takes less.",
        (*_JOB, "source"),
    ),
    "envpipe_job_slowdown_uncertainty_ratio": ("Standard uncertainty of what was measured.", _JOB),
    "envpipe_job_power_watts": (
        "Of an average GPU: the budget of now; since the first one the mean, the peak in a window "
        "of iterations, and the largest swing from one window to the next.",
        (*_JOB, "of"),
    ),
    "envpipe_job_power_ramp_watts_per_second": ("The fastest swing.", _JOB),
    "envpipe_job_power_exceeded_seconds_total": ("Time more than 1 % above the budget.", _JOB),
}
#: What the times of `SHARES` are called here.
_SPENT = ("units", "receives", "rest")


class _Families(dict[str, CounterMetricFamily | GaugeMetricFamily]):
    """All families, to which a scrape adds its samples."""

    def __init__(self) -> None:
        for name, (text, labels) in FAMILIES.items():
            made = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            self[name] = made(name, text, labels=labels)

    def add(self, name: str, value: float | None, *labels: object) -> None:
        """Add a sample; none whose value is not known. A label that is None is empty."""
        if value is not None:
            texts = ["" if label is None else str(label) for label in labels]
            self[f"envpipe_{name}"].add_metric(texts, value)


class _NodeMetrics(Collector):
    """Reads GPUs and bill at each scrape."""

    def __init__(self, agent: NodeAgent, job_name: str, tariff: Tariff) -> None:
        self._agent = agent
        self._job_name = job_name
        self._tariff = tariff
        self._scraping = threading.Lock()
        #: What asked each GPU's driver last; one that hangs keeps it.
        self._asking: dict[GpuLedger, threading.Thread] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of every GPU that ranks have used, of the node and of the job."""
        found = _Families()
        node, gpus = (self._job_name, self._agent.log.node), dict[str, list[str]]()
        ledgers = self._agent.gpus.ledgers()
        now = self._ask(ledgers)
        for ledger in ledgers:
            gpu = [getattr(ledger.of_gpu, name) for name in _OF_LEDGER]
            self._add_gpu(found, ledger, *node, *gpu)
            for name, value in now.get(ledger, {}).items():
                found.add(name, value, *node, *gpu)
            gpus[ledger.of_gpu.gpu_uid] = gpu
        with contextlib.suppress(GpuError, OSError):  # a folder of leases that cannot be read
            for lease in list_leases():
                gpu, slows = gpus.get(lease.address.uid, []), lease.said["lowest_mhz"] is not None
                if gpu and lease.live and slows:
                    found.add("gpu_slowed_info", 1, *node, *gpu, *map(lease.mark.get, _SLOWED))
        found.add("node_ranks", len(self._agent.connected()), *node)
        if (bill := self._agent.bill) is not None:
            self._add_job(found, bill.snapshot())
        yield from found.values()

    def _ask(self, ledgers: Iterable[GpuLedger]) -> dict[GpuLedger, dict[str, float | None]]:
        """Return the figures of each GPU that its driver gives in time, by family."""
        found = dict[GpuLedger, dict[str, float | None]]()

        def ask(ledger: GpuLedger) -> None:
            now = found[ledger] = {}
            with contextlib.suppress(Exception):  # a GPU that was lost has no figures now
                now["gpu_power_watts"] = ledger.gpu.power_w
                clock = ledger.clock()
                now["gpu_sm_clock_hertz"] = clock.observed_mhz * 1e6
                if clock.requested_mhz is not None:
                    now["gpu_sm_clock_requested_hertz"] = clock.requested_mhz * 1e6
                now["gpu_power_limit_watts"] = ledger.gpu.power_state().power_limit_w

        asking, until_s = self._asking, time.monotonic() + _DRIVERS_S
        with self._scraping, contextlib.suppress(RuntimeError):  # no thread can be started
            free = [each for each in ledgers if not (each in asking and asking[each].is_alive())]
            for ledger in free:
                asking[ledger] = threading.Thread(target=ask, args=(ledger,), daemon=True)
                asking[ledger].start()
            for ledger in free:
                asking[ledger].join(max(0.0, until_s - time.monotonic()))
        return {ledger: now.copy() for ledger, now in found.copy().items()}

    def _add_gpu(self, found: _Families, ledger: GpuLedger, *gpu: object) -> None:
        found.add("gpu_energy_joules_total", ledger.energy_j, *gpu)
        for reason, time_s in ledger.throttled_s.copy().items():
            found.add("gpu_throttle_seconds_total", time_s, *gpu, reason)
        for spent, time_s in zip(_SPENT, ledger.trained.known_shares_s or (), strict=False):
            found.add("gpu_training_seconds_total", time_s, *gpu, spent)
        if (last := ledger.last) is not None:
            found.add("gpu_phase_info", 1, *gpu, last.phase)
            if last.steps:
                found.add("gpu_iteration_seconds", last.duration_s / last.steps, *gpu)
                found.add("gpu_iteration_joules", last.energy_j / last.steps, *gpu)

    def _add_job(self, found: _Families, bill: Bill) -> None:
        add, job = found.add, self._job_name
        total, iterations, each_j = bill.total(), bill.num_iterations, bill.per_unit()
        add("job_info", 1, job, *map(bill.facts.get, _ABOUT))
        add("job_gpus", len(total.gpus), job, "billed")
        add("job_gpus", bill.fact("num_gpus"), job, "expected")
        add("job_iterations_total", iterations, job)
        add("job_energy_joules_total", total.energy_j, job)
        add("job_token_joules", each_j.get("token"), job)
        tokens = bill.fact("tokens_per_iteration")
        if tokens is not None and bill.has_one_batch:
            add("job_tokens_total", iterations * tokens, job)
        known = self._tariff.facts(total.energy_j)
        add("job_cost_total", known.get("cost"), job)
        add("job_co2_grams_total", known.get("co2_g"), job)
        if isinstance(power := bill.facts.get("power"), dict):
            for of in ("budget", "mean", "peak", "swing"):
                add("job_power_watts", power.get(f"{of}_w"), job, of)
            add("job_power_ramp_watts_per_second", power.get("ramp_w_per_s"), job)
            add("job_power_exceeded_seconds_total", power.get("exceeded_s"), job)
        measured = bill.comparison()
        predicted = bill.facts.get("predicted")
        sources = {"predicted": predicted, "measured": measured and vars(measured)}
        for name in ("saving", "slowdown"):
            for source, its in sources.items():
                ratio = _ratio(its.get(f"{name}_percent")) if isinstance(its, dict) else None
                add(f"job_{name}_ratio", ratio, job, source)
            error = getattr(measured, f"{name}_uncertainty_percent", None)
            add(f"job_{name}_uncertainty_ratio", _ratio(error), job)


def _ratio(percent: object) -> float | None:
    return percent / 100 if isinstance(percent, int | float) else None


def serve_metrics(
    agent: NodeAgent, address: str, port: int, job_name: str, tariff: Tariff
) -> Callable[[], None]:
    """Serve a node's metrics, and `/control`, over HTTP; return what ends that.

    EnvPipeError: it cannot listen.
    """
    registry = CollectorRegistry()
    registry.register(_NodeMetrics(agent, job_name, tariff))
    try:
        server, _ = start_http_server(port, address, registry)
    except OSError as error:
        raise EnvPipeError(
            f"Cannot serve metrics there: {error.strerror}",
            value=f"{address}:{port}",
            remedy="Give another --prometheus-port or --prometheus-address.",
        ) from error

    server.set_app(with_control(make_wsgi_app(registry), agent))

    def end() -> None:
        server.shutdown()
        server.server_close()

    return end


def with_control(metrics: _App, agent: NodeAgent) -> _App:
    """Return the app that answers `/control`, and all else as `metrics` does."""

    def answer(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/control":
            return metrics(environ, start_response)
        try:
            status, said = "200 OK", _answer(environ, agent)
        except (EnvPipeError, OSError, ValueError) as error:
            status, said = _REFUSED.get(type(error), "400 Bad Request"), {"error": str(error)}
        start_response(status, [("Content-Type", _JSON)])
        return [(json.dumps(said) + "\n").encode()]

    return answer


def _answer(environ: dict[str, Any], agent: NodeAgent) -> dict[str, Any]:
    if agent.bill is None or agent.control is None:
        raise FileNotFoundError("Ask on the node of rank 0, of a job that has a folder")
    path, asked = Path(agent.control["file"]), agent.control["asked"]
    if environ["REQUEST_METHOD"] != "GET":
        # Nobody is asked who they are: users of this node may, pages in their browsers may not,
        # even if the pages' own names have this address by now.
        kind = environ.get("CONTENT_TYPE", "").partition(";")[0].strip()
        host = urlsplit(f"//{environ.get('HTTP_HOST', 'localhost')}").hostname
        if not (_is_here(environ["REMOTE_ADDR"]) and _is_here(host) and kind == _JSON):
            raise PermissionError(f"Ask from this node, by 127.0.0.1, with Content-Type: {_JSON}")
        length = environ.get("CONTENT_LENGTH", "")
        most = min(int(length), _MOST_BYTES) if length.isdecimal() else 0
        body = environ["wsgi.input"].read(most).decode(errors="replace")
        replace_files({path: [json.dumps(parse_wishes(body, path).to_json()), "\n"]})
    with contextlib.suppress(FileNotFoundError):
        asked = parse_wishes(read_text(path), path).to_json()
    return {**asked, "file": str(path)}


def _is_here(host: str | None) -> bool:
    """Return whether a name or address can only be this node's own."""
    with contextlib.suppress(ValueError):
        return ip_address((host or "").removeprefix("::ffff:")).is_loopback
    return host == "localhost"
