"""Nodes that are network namespaces: they share a machine, and reach each other by a link alone.

The quickstart's worker trains a GPT over the nodes, and again on one of them: the same, bit by bit.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from networks import needs_namespaces, network
from presets import write_changed_preset
from whole_nodes import Job, assert_equals_counters, full, new_job, summed

from envpipe_megatron.trials.ranks import EVENT_MARK
from envpipe_megatron.trials.settings import RUNS, Settings

pytestmark = [pytest.mark.xdist_group("launch"), needs_namespaces()]

#: Three clocks, and a counter that refreshes often: a profile of it takes seconds.
PRESET_CHANGES = {"min_frequency_mhz": 1350, "frequency_step_mhz": 30, "refresh_s": 0.02}


def start_quickstart(job: Job, num_stages: int, per_node: int) -> Settings:
    """Train both runs of the quickstart, over all phases."""
    output = job.folder / "output"
    output.mkdir()
    settings = Settings(
        output_dir=str(output),
        text=__file__,
        preset=str(write_changed_preset(job.folder / "few-clocks.toml", PRESET_CHANGES)),
        num_stages=num_stages,
        num_layers=num_stages,
        num_microbatches=num_stages + 2,
        forward_time_s=0.01,
        steady_iterations=4,
    )
    (output / "settings.json").write_text(json.dumps(asdict(settings)))
    settings.text_copy.write_bytes(Path(__file__).read_bytes())
    script = ["--module", "envpipe_megatron.trials.worker", str(output / "settings.json")]
    job.start(script, per_node=per_node)
    return settings


def results(job: Job) -> dict[str, dict[str, Any]]:
    """Return what rank 0 said of each run."""
    found = {}
    for line in "\n".join(node.said for node in job.nodes).splitlines():
        if line.startswith(EVENT_MARK):
            event = json.loads(line.removeprefix(EVENT_MARK))
            if event["event"] == "turn":
                found[event["arm"]] = event
    assert list(found) == [arm.name for arm in RUNS], job.said()
    return found


@pytest.mark.parametrize("num_nodes", [pytest.param(number, marks=full) for number in (2, 4)])
def test_nodes_train_as_one_does(num_nodes):
    with network(num_nodes) as hosts, new_job() as many, new_job() as one:
        for index, host in enumerate(hosts):
            many.node(f"n{index}", **host.place)
        one.node("alone")
        settings = start_quickstart(many, num_nodes, per_node=1)
        start_quickstart(one, num_nodes, per_node=num_nodes)
        assert [node.wait() for node in many.nodes] == [0] * num_nodes, many.said()
        assert one.nodes[0].wait() == 0, one.said()
        for job in (many, one):
            job.wait_until_none_runs()
            assert [left for node in job.nodes for left in node.left()] == []

        mine, alone = results(many), results(one)
        for run, result in mine.items():
            steps = min(len(result["losses"]), len(alone[run]["losses"]))
            assert steps >= settings.warmup_iterations + settings.steady_iterations
            # JSON keeps every bit of a number.
            assert result["losses"][:steps] == alone[run]["losses"][:steps]
            digests = [stage["weights_sha256"] for stage in result["stages"]]
            assert digests == [stage["weights_sha256"] for stage in alone[run]["stages"]]

        for job in (many, one):
            bill = job.nodes[0].bill
            assert bill["complete"], bill["missing"]
            assert_equals_counters(bill["job"]["energy_j"], job.nodes)
            told = summed(*(node.log for node in job.nodes))
            assert told["job"]["energy_j"] == bill["job"]["energy_j"]
            assert [node["num_gpus"] for node in told["nodes"]] == [
                num_nodes // len(job.nodes)
            ] * len(job.nodes)
