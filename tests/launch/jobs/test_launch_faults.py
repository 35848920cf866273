"""Faults at random points of jobs on whole nodes: what is left, what is billed, how long it takes.

ENVPIPE_FAULT_ROUNDS repeats each fault at other points (1), ENVPIPE_FAULT_SEED chooses them.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from networks import Host, needs_namespaces, network
from plain_job import PLANNED_MHZ, WARMUP_ITERATIONS
from whole_nodes import Job, Node, assert_equals_counters, full, new_job, summed

pytestmark = pytest.mark.xdist_group("launch")

ROUNDS = int(os.environ.get("ENVPIPE_FAULT_ROUNDS", "1"))
SEED = os.environ.get("ENVPIPE_FAULT_SEED", "0")

#: More than any fault leaves time for.
FOR_EVER = 100_000
#: What an iteration of the plan takes; the fault may come anywhere within.
ITERATION_S = 0.2
#: A bill need not wait as long as a user's for nodes that a test has killed.
LOST = {"others_end_s": 3.0}
#: From the fault to the end of the last process. The ranks' own time-outs are 20 s; torchrun looks
#: after its ranks ten times a second; the rest is for machines with many other tests.
BOUND_S = 90.0
#: TCP sends again what was lost after 0.2 s, then each time after twice as long.
SHORT_CUT_S = 5.0


@pytest.fixture(params=range(ROUNDS))
def chance(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(f"{SEED} {request.node.name}")


def reach_a_random_point(job: Job, chance: random.Random) -> int:
    """Return after some iterations, anywhere within one, while all clocks are locked."""
    iteration = job.hear_iteration(chance.randrange(WARMUP_ITERATIONS, 15))["iteration"]
    time.sleep(chance.uniform(0, ITERATION_S))  # waits for nothing: it is where the fault comes
    for node in job.nodes:
        locked_mhz = node.locked_mhz()
        assert locked_mhz
        assert set(locked_mhz) <= set(PLANNED_MHZ)
    return iteration


def end_in_time(job: Job, nodes: Sequence[Node] | None = None) -> list[int]:
    """Wait for the end of all that runs, which may leave nothing; return the exit statuses.

    Of `nodes`, by default all.
    """
    begin_s = time.monotonic()
    nodes = job.nodes if nodes is None else nodes
    codes = [node.wait(BOUND_S) for node in nodes]
    job.wait_until_none_runs(max(0.0, begin_s + BOUND_S - time.monotonic()))
    for node in nodes:
        assert node.left() == [], job.said()
    return codes


@contextlib.contextmanager
def two_nodes(
    iterations: int, *options: str, elastic: bool = False, hosts: Sequence[Host] = (), **how: Any
) -> Iterator[Job]:
    """A job on nodes a and b, of which a has rank 0 unless they are elastic, on this machine or
    on `hosts`. `options` are torchrun's, `how` is for `Node.start`.
    """
    with new_job() as job:
        for index, name in enumerate("ab"):
            job.node(name, **(hosts[index].place if hosts else {})).add_gpus(0)
        job.start_plain(iterations, elastic=elastic, options=options, **how)
        yield job


def node_of_rank_0(job: Job) -> Node:
    (node,) = (node for node in job.nodes if (node.output / "bill.json").exists())
    return node


def complete_bill(job: Job, node: Node) -> dict[str, Any]:
    """The bill that a node wrote, which has all that the counters of all nodes counted."""
    bill = node.bill
    assert bill["complete"], bill["missing"]
    assert_equals_counters(bill["job"]["energy_j"], job.nodes)
    return bill


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@full
def test_a_killed_rank_starts_again(chance):
    with two_nodes(25, "--max-restarts", "1", elastic=True) as job:
        reach_a_random_point(job, chance)
        kill(job.pid_of(chance.randrange(2)))
        assert end_in_time(job) == [0, 0], job.said()
        bill = complete_bill(job, node_of_rank_0(job))
        assert bill["job"]["iterations"] == 25, "repeated ones count once"
        for rank in range(2):
            trained = job.trained(rank)
            assert [entry["iteration"] for entry in trained] == list(range(25))
            assert len({entry["pid"] for entry in trained}) == 2


@full
@pytest.mark.parametrize("victim", [0, 1], ids=["of rank 0", "other"])
def test_a_killed_launcher_ends_the_job(chance, victim):
    with two_nodes(FOR_EVER, **LOST) as job:
        reach_a_random_point(job, chance)
        killed, other = job.nodes[victim], job.nodes[1 - victim]
        kill(killed.launcher_pid)
        codes = end_in_time(job)
        assert codes[victim] == -signal.SIGKILL
        assert codes[1 - victim] > 0
        told = summed(killed.log, other.log)
        assert not told["complete"]
        assert len(told["missing"]) == 1
        assert told["missing"][0].startswith(f"{killed.name} was lost")
        own_j = next(n["energy_j"] for n in told["nodes"] if n["node"] == other.name)
        assert_equals_counters(own_j, [other])
        if victim == 1:
            assert other.bill["missing"] == told["missing"]
            assert other.bill["job"]["energy_j"] == told["job"]["energy_j"]
            assert f"INCOMPLETE: {told['missing'][0]}" in other.said
        else:
            assert not (killed.output / "bill.json").exists()
            assert "the job's bill may lack them" in other.said


@full
def test_torchrun_is_killed_while_ranks_start(chance):
    with two_nodes(FOR_EVER) as job:
        job.hear(lambda event: event["event"] == "started")
        time.sleep(chance.uniform(0, 0.5))  # where the fault comes
        kill(chance.choice(job.nodes).torchrun_pid())
        assert 0 not in end_in_time(job), job.said()


@full
def test_all_of_a_node_is_killed(chance):
    """Its guard too, as by a node that is switched off and on; then the job starts again."""
    with two_nodes(FOR_EVER, **LOST) as job:
        reach_a_random_point(job, chance)
        a, b = job.nodes
        guards = b.processes("envpipe_megatron.gpu.guard.process")
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none lives to see another's end
            for pid in sorted(b.processes(), key=guards.__contains__):
                os.kill(pid, number)
        assert end_in_time(job, [a])[0] > 0
        assert a.bill["missing"][0].startswith("b was lost")
        assert b.left(), "nobody is there to bring its clocks back"
        before_j = summed(a.log, b.log)["job"]["energy_j"]

        done = len(job.trained(0))
        job.start_plain(done + 10)
        assert end_in_time(job) == [0, 0], job.said()
        bill = a.bill
        assert bill["job"]["energy_j"] > before_j
        assert bill["job"]["energy_j"] == summed(a.log, b.log)["job"]["energy_j"]
        # What the first start's b did after its last line is in no log.
        assert not bill["complete"]


@pytest.mark.usefixtures("signals_at_default")
@full
@pytest.mark.parametrize(
    "fault", ["rank", "torchrun", signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=str
)
def test_a_killed_rank_or_torchrun_or_a_signal_ends_the_job_in_order(chance, fault):
    with two_nodes(FOR_EVER) as job:
        reach_a_random_point(job, chance)
        victim = chance.choice(job.nodes)
        if fault == "rank":
            kill(job.pid_of(chance.randrange(2)))
        elif fault == "torchrun":
            kill(victim.torchrun_pid())
        else:
            os.kill(victim.launcher_pid, fault)
        assert 0 not in end_in_time(job), job.said()
        complete_bill(job, job.nodes[0])


@pytest.mark.usefixtures("signals_at_default")
@full
def test_a_terminal_that_goes_away_ends_the_job_in_order(chance):
    """By SIGHUP; and nothing can be printed any more."""
    with new_job() as job:
        node = job.node("a")
        node.add_gpus(0)
        ours, terminal = os.openpty()
        job.start_plain(FOR_EVER, terminal=terminal)
        os.close(terminal)
        reach_a_random_point(job, chance)
        os.close(ours)
        assert end_in_time(job)[0] > 0
        complete_bill(job, node)


@full
def test_a_killed_guard_is_followed_by_another(chance):
    """Ranks that had it train on without clock control; one that starts again has the new one."""
    with two_nodes(60, "--max-restarts", "1", elastic=True) as job:
        reach_a_random_point(job, chance)
        victim = chance.choice(job.nodes)
        (guard,) = victim.processes("envpipe_megatron.gpu.guard.process")
        kill(guard)
        freed = job.hear(lambda event: event.get("locked_mhz", 0) is None)
        rank, pid = freed["rank"], freed["pid"]
        assert pid in victim.processes()
        kill(pid)
        job.hear(
            lambda e: (
                (e["rank"], e.get("locked_mhz")) in [(rank, mhz) for mhz in PLANNED_MHZ]
                and e["pid"] != pid
            )
        )
        assert end_in_time(job) == [0, 0], job.said()
        complete_bill(job, node_of_rank_0(job))


@full
@needs_namespaces()
def test_a_link_that_fails_for_a_while_does_no_harm(chance):
    with network(2) as hosts, two_nodes(60, hosts=hosts) as job:
        reach_a_random_point(job, chance)
        host = chance.choice(hosts)
        host.cut()
        time.sleep(SHORT_CUT_S)  # this long is the fault
        host.mend()
        assert end_in_time(job) == [0, 0], job.said()
        bill = complete_bill(job, job.nodes[0])
        assert bill["job"]["iterations"] == 60


@full
@needs_namespaces()
def test_a_link_that_fails_for_good_ends_the_job(chance):
    with network(2) as hosts, two_nodes(FOR_EVER, hosts=hosts, **LOST) as job:
        reach_a_random_point(job, chance)
        chance.choice(hosts).cut()
        assert 0 not in end_in_time(job), job.said()
        a, b = job.nodes
        assert a.bill["missing"] == ["b was lost: its energy up to its last line is in the bill"]
        assert "the job's bill may lack them" in b.said
        # Both ended in order, and their files have all.
        told = summed(a.log, b.log)
        assert told["complete"], told["missing"]
        assert told["job"]["energy_j"] > a.bill["job"]["energy_j"]
        assert_equals_counters(told["job"]["energy_j"], job.nodes)


@full
@needs_namespaces()
def test_a_node_loses_its_power(chance):
    """Nobody says good-bye: no connection is closed."""
    with network(2) as hosts, two_nodes(FOR_EVER, hosts=hosts, **LOST) as job:
        reach_a_random_point(job, chance)
        victim = chance.randrange(2)
        lost, other = job.nodes[victim], job.nodes[1 - victim]
        hosts[victim].cut()
        for pid in lost.processes():
            kill(pid)
        assert end_in_time(job, [other])[0] > 0
        told = summed(lost.log, other.log)
        assert [reason.split(" was lost")[0] for reason in told["missing"]] == [lost.name]
        own_j = next(node["energy_j"] for node in told["nodes"] if node["node"] == other.name)
        assert_equals_counters(own_j, [other])


@full
def test_jobs_at_once_on_one_machine():
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(new_job()) for _ in range(2)]
        one, two = nodes = [job.node("a") for job in jobs]
        two.share_machine(one)
        for job, node in zip(jobs, nodes, strict=True):
            node.add_gpus(0)
            job.start_plain(20)
        for job, node in zip(jobs, nodes, strict=True):
            assert node.wait() == 0, node.said
            job.wait_until_none_runs()
            assert node.bill["complete"]
            assert node.bill["job"]["iterations"] == 20
            assert_equals_counters(node.bill["job"]["energy_j"], [node])
            assert node.left() == []
