"""Two nodes under `envpipe launch`: one bill, to the last joule of every counter."""

import json
import math
import time

import pytest
from networks import needs_namespaces, network, why_not
from plain_job import PLANNED_MHZ
from whole_nodes import assert_equals_counters, full, new_job, summed

pytestmark = pytest.mark.xdist_group("launch")

ITERATIONS = 16


def by_rank(bill: dict) -> list:
    return sorted(bill["gpus"], key=lambda gpu: gpu["rank"])


@pytest.fixture
def places(request):
    """Where the two nodes are: both on loopback, or each a network namespace of its own."""
    if request.param == "loopback":
        yield {}, {}
        return
    with network(2) as hosts:
        yield [host.place for host in hosts]


@pytest.mark.parametrize(
    ("places", "per_node"),
    [
        # Where there can be namespaces, they have all that loopback has.
        pytest.param("loopback", 1, marks=() if why_not() else full),
        pytest.param("namespaces", 1, marks=needs_namespaces()),
        pytest.param("loopback", 2, marks=full),
    ],
    indirect=["places"],
)
def test_two_nodes_get_one_bill(places, per_node):
    with new_job() as job:
        a, b = (job.node(name, **place) for name, place in zip("ab", places, strict=True))
        for node in (a, b):
            node.add_gpus(*range(per_node))
        job.start_plain(ITERATIONS, per_node=per_node, price_per_kwh=0.2, bill_interval=2)
        job.hear_iteration(4)
        locked_mhz = [*a.locked_mhz(), *b.locked_mhz()]
        assert set(locked_mhz) <= set(PLANNED_MHZ), "the fault of every test is under a lock"
        assert [a.wait(), b.wait()] == [0, 0], job.said()
        job.wait_until_none_runs()
        assert [*a.left(), *b.left()] == []
        assert [len(job.trained(rank)) for rank in range(2 * per_node)] == [ITERATIONS] * (
            2 * per_node
        )

        bill = a.bill
        total = bill["job"]
        assert bill["complete"], bill["missing"]
        assert_equals_counters(total["energy_j"], [a, b])
        for node in bill["nodes"]:
            own = next(n for n in job.nodes if n.name == node["node"])
            assert_equals_counters(node["energy_j"], [own])
            assert (node["num_gpus"], node["running"], node["exit_code"]) == (per_node, False, 0)
        for part in ("nodes", "stages", "gpus", "phases"):
            parts_j = [entry["energy_j"] for entry in bill[part]]
            # Each part is rounded by itself, the exact total once.
            assert math.fsum(parts_j) == pytest.approx(total["energy_j"], rel=1e-14)
        assert [stage["num_gpus"] for stage in bill["stages"]] == [1] * (2 * per_node)
        assert total["num_gpus"] == 2 * per_node
        assert total["iterations"] == ITERATIONS
        assert total["energy_per_iteration_j"] == total["energy_j"] / ITERATIONS
        assert total["energy_per_token_j"] == total["energy_j"] / ITERATIONS / 1000
        assert total["cost"] == total["energy_j"] / 3.6e6 * 0.2

        # Files and live sums are the same sums: exact, and rounded once.
        told = summed(a.log, b.log)
        assert told["job"]["energy_j"] == total["energy_j"]
        assert by_rank(told) == by_rank(bill)
        assert told["complete"]
        assert not told["unreadable_lines"]

        assert not (b.output / "bill.json").exists()
        own_j = next(node["energy_j"] for node in bill["nodes"] if node["node"] == "b")
        assert f"{own_j:.1f} J on this node, in {b.log}" in b.said
        assert "iterations: " in a.said, "a live line"


@full
def test_a_node_may_start_late_and_a_second_start_goes_on_with_the_bill():
    """The same command again, as a batch system's requeue: one log of both starts."""
    with new_job() as job:
        a, b = job.node("a"), job.node("b")
        for node in (a, b):
            node.add_gpus(0)
        for start, upto in enumerate((8, 12), 1):
            port = job.start_plain(upto, nodes=[a])
            time.sleep(10.0)
            job.start_plain(upto, nodes=[b], port=port)
            assert [a.wait(), b.wait()] == [0, 0], job.said()
            bill = a.bill
            assert (bill["complete"], bill["job"]["iterations"]) == (True, upto)
            assert_equals_counters(bill["job"]["energy_j"], [a, b])
            notes = [json.loads(line).get("note") for line in b.log.read_text().splitlines()]
            assert (notes.count("begun"), notes.count("ended")) == (start, start)
        assert summed(a.log, b.log)["job"]["energy_j"] == bill["job"]["energy_j"]
