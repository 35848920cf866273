"""Live figures of a node in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.launch.agent.agent import NodeAgent

_LABELS = ("node", "gpu", "gpu_uid", "rank", "stage")


class _NodeMetrics(Collector):
    """Reads the GPUs at each scrape."""

    def __init__(self, agent: NodeAgent) -> None:
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        """The figures of every GPU that ranks have used."""
        power = GaugeMetricFamily("envpipe_gpu_power_watts", "Power now.", labels=_LABELS)
        clock = GaugeMetricFamily("envpipe_gpu_sm_clock_hertz", "SM clock now.", labels=_LABELS)
        energy = CounterMetricFamily(
            "envpipe_gpu_energy_joules", "Energy since the GPU was first used.", labels=_LABELS
        )
        for ledger in self._agent.ledgers():
            values = {**ledger.labels, "node": self._agent.log.node}
            labels = [str(values.get(name, "")) for name in _LABELS]
            energy.add_metric(labels, ledger.metered_j)
            try:
                power.add_metric(labels, ledger.gpu.power_w)
                clock.add_metric(labels, ledger.gpu.observed_frequency_mhz * 1e6)
            except GpuError:
                continue  # a GPU that was lost has no figures now
        yield from (power, clock, energy)
        running = GaugeMetricFamily(
            "envpipe_node_ranks", "Ranks of this node that train.", labels=["node"]
        )
        running.add_metric([self._agent.log.node], len(self._agent.connected()))
        yield running


def serve_metrics(agent: NodeAgent, address: str, port: int) -> Callable[[], None]:
    """Serve a node's metrics over HTTP; return what ends that. EnvPipeError: it cannot listen."""
    registry = CollectorRegistry()
    registry.register(_NodeMetrics(agent))
    try:
        server, _ = start_http_server(port, address, registry)
    except OSError as error:
        raise EnvPipeError(
            f"Cannot serve metrics there: {error.strerror}",
            value=f"{address}:{port}",
            remedy="Give another --prometheus-port or --prometheus-address.",
        ) from error

    def end() -> None:
        server.shutdown()
        server.server_close()

    return end
