"""The sums of a job's energy logs: the same in any order of nodes, and of bounded size."""

import gc
import io
import math
import re
from dataclasses import astuple

import pytest
from energy_lines import bill, error_of, job, note, parsed, window
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from rich.console import Console

from envpipe_megatron.formats.bill import Bill, NodeBill
from envpipe_megatron.formats.energy_sums import EnergySums
from envpipe_megatron.formats.steps import StepEnergy, compare
from envpipe_megatron.launch.bill import (
    Tariff,
    bill_facts,
    bill_lines,
    show_bill,
)

# Sums ----------------------------------------------------------------------------------------

amounts = st.floats(0, 1e12, exclude_max=True)
windows = st.builds(
    window,
    gpu=st.integers(0, 2),
    iteration=st.none() | st.integers(0, 9),
    energy_j=amounts,
    node=st.sampled_from(["n0", "n1"]),
    stage=st.none() | st.integers(0, 1),
    run=st.sampled_from(["", "a"]),
    phase=st.sampled_from(["steady", "warm-up", "between", "plan"]),
    duration_s=amounts,
    energy_uncertainty_j=st.none() | amounts,
    compute_s=st.none() | amounts,
)
KEYS = [(), ("node",), ("gpu_key",), ("stage",), ("run", "phase")]


def amounts_of(total: EnergySums) -> tuple[object, ...]:
    """All of a sum; in nan, none is equal to itself."""
    known = total.energy_uncertainty_j, total.known_shares_s
    return total.windows, total.gpus, total.energy_j, total.duration_s, total.steps, *known


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(windows, max_size=20), st.randoms())
def test_sums_are_the_same_to_the_last_bit_in_whatever_order_nodes_send(entries, random):
    """Each GPU's lines come in order, and those of GPUs in any."""
    lines = parsed(entries)
    one = Bill(lines)
    left = {line.gpu_key: [w for w in lines if w.gpu_key == line.gpu_key] for line in lines}
    turns = [line.gpu_key for line in lines]
    random.shuffle(turns)
    other = Bill(left[gpu].pop(0) for gpu in turns)
    assert amounts_of(other.total()) == amounts_of(one.total())
    assert one.total().energy_j == pytest.approx(math.fsum(line.energy_j for line in lines))
    for names in KEYS:
        totals = one.total_by(*names)
        others = other.total_by(*names)
        assert list(others) == list(totals)
        assert list(map(amounts_of, others.values())) == list(map(amounts_of, totals.values()))
        for key, total in totals.items():
            own = [w for w in lines if tuple(getattr(w, name) for name in names) == key]
            assert total.energy_j == pytest.approx(math.fsum(w.energy_j for w in own))
            assert total.windows == len(own)
            assert len(total.gpus) == len({w.gpu_key for w in own})
    for phase in ("steady", "warm-up"):
        assert other.steps(phase) == one.steps(phase)
    assert other.num_iterations == one.num_iterations


def test_sums_come_by_run_rank_stage_gpu_and_phase():
    """What a line does not say comes first, and a phase that nobody knows last."""
    places = [
        ("", None, 1, "n0", "steady"),
        ("", 0, None, "n1", "steady"),
        ("", 0, 0, "n0", "warm-up"),
        ("", 0, 0, "n0", "steady"),
        ("", 0, 0, "n0", "between"),
        ("", 0, 0, "n0", "a new one"),
        ("", 0, 0, "n1", "warm-up"),
        ("", 0, 1, "n0", "framework"),
        ("", 1, 0, "n0", "framework"),
        ("a", 0, 0, "n0", "framework"),
    ]
    names = ("run", "rank", "stage", "node", "phase")
    made = bill(*(window(**dict(zip(names, place, strict=True))) for place in reversed(places)))
    assert list(made.total_by(*names)) == places


def reachable(thing: object) -> int:
    """How many objects hang on one."""
    seen, todo = {id(thing)}, [thing]
    while todo:
        for other in gc.get_referents(todo.pop()):
            if id(other) not in seen and not isinstance(other, type):
                seen.add(id(other))
                todo.append(other)
    return len(seen)


def test_a_bill_does_not_grow_with_its_lines():
    grows = Bill()
    sizes = []
    for iteration in range(1024):
        for gpu in range(2):
            for phase in ("steady", "between") if iteration % 10 == 9 else ("steady",):
                grows.add(*parsed([window(gpu, iteration, 0.1 * iteration, phase=phase)]))
        if iteration in (31, 1023):
            sizes.append(reachable(grows))
    assert sizes[1] < sizes[0] + 100  # of 2000 lines; a large number is an object of its own


# Steps ---------------------------------------------------------------------------------------


def test_an_iteration_that_is_repeated_counts_once_and_its_energy_twice():
    """After a restart iterations 3 and 4 run again."""
    made = bill(*(window(0, i) for i in (0, 1, 2, 3, 4, 3, 4, 5)))
    assert made.num_iterations == 6
    assert made.total().energy_j == 800
    assert made.per_unit() == {"iteration": pytest.approx(800 / 6)}
    assert made.steps("steady").iterations == 8
    assert made.steps("steady").energy_j == 100


def test_windows_of_many_iterations():
    made = bill(
        window(0, 0, 300.0, last_iteration=2, duration_s=6.0),
        window(0, 3, 100.0),
        window(0, 5, 1.0, last_iteration=4),  # the wrong way round: no iteration
        window(0, None, 1.0, last_iteration=7),
        window(0, 7, 1.0, last_iteration=None),
    )
    assert made.num_iterations == 4
    assert made.steps("steady").iterations == 4


@pytest.mark.parametrize("says", [{}, {"num_ranks": 4}], ids=["no size", "its size"])
@pytest.mark.parametrize("there", [(2, 3), (1, 2, 3), (0, 1), (0, 2, 3)])
def test_a_bill_of_survivors_is_incomplete_and_has_no_j_per_iteration(there, says):
    """Ranks of a node are missing; of the last ones, only what lines say of all shows it."""
    made = bill(*(window(rank, i, **says) for rank in there for i in range(3)))
    if there == (0, 1) and not says:
        assert made.per_unit() == {"iteration": 200}
        return
    assert made.missing() == [f"{4 - len(there)} of 4 ranks sent nothing"]
    assert made.per_unit() == {}
    lines = bill_lines(made, Tariff())
    assert lines[-1] == f"INCOMPLETE: {4 - len(there)} of 4 ranks sent nothing"
    assert not [line for line in lines if "J per" in line]
    assert not bill_facts(made, Tariff())["complete"]


def test_each_start_has_its_own_ranks(tmp_path):
    """A job may go on with fewer; but those of each start must be there."""
    lines = [window(rank, 0, run=STARTS[0], num_ranks=4) for rank in range(4)]
    lines += [window(rank, 1, run=STARTS[1], num_ranks=2) for rank in range(2)]
    assert bill(*lines).missing() == []
    assert bill(*lines[1:]).missing() == [f"1 of 4 ranks of {STARTS[0]} sent nothing"]


STARTS = ("2026-01-31T12:00:00.000+00:00", "2026-01-31T13:00:00.000+00:00")


def test_iterations_of_other_runs_are_others_and_those_of_a_restart_the_same():
    facts = job(tokens_per_iteration=1000, samples_per_iteration=8)
    made = bill(facts, *(window(0, i, run=run) for run in ("a", "b") for i in range(3)))
    assert made.num_iterations == 6
    assert made.per_unit() == {"iteration": 100}  # which run has so many tokens is not said
    runs = [f"a {start}" for start in STARTS]
    goes_on = [window(0, i, run=run) for run, i in zip(runs * 2, (0, 1, 1, 2), strict=True)]
    made = bill(facts, *goes_on, *(window(0, i, run=f"a {STARTS[1]}9") for i in (1, 2, 3)))
    assert made.num_iterations == 4
    assert made.per_unit() == {"iteration": 175, "token": 0.175, "sample": 21.875}


def test_iterations_of_other_batches_have_no_number_of_tokens():
    small, large = job(tokens_per_iteration=1000), job(tokens_per_iteration=4000)
    made = bill(small, window(0, 0), large, window(0, 1))
    assert made.per_unit() == made.snapshot().per_unit() == {"iteration": 100}
    assert bill(small).per_unit() == {}
    assert bill(small, large, window(0, 0)).per_unit() == {"iteration": 100, "token": 0.025}


TIMES_S = (2.0, 2.1, 1.9, 2.05)
BASELINE = {
    "iterations": 5,
    "time_s": 1.9,
    "time_uncertainty_s": 0.01,
    "energy_j": 125.0,
    "metering_uncertainty_j": 0.4,
}


def steady(gpu: int, energy_j: float, **fields):
    return [window(gpu, i, energy_j, duration_s=s, **fields) for i, s in enumerate(TIMES_S)]


def test_saving_against_the_jobs_own_baseline():
    made = bill(*steady(0, 90.0, baseline=BASELINE), *steady(1, 110.0, baseline=BASELINE))
    # Two GPUs that read four windows each, and step together.
    metering_j = math.sqrt(8 * 0.5**2) / 4 / 2
    mean = StepEnergy(4, sum(TIMES_S) / 4, error_of(TIMES_S), 100.0, metering_j)
    assert astuple(made.steps("steady")) == pytest.approx(astuple(mean))
    expected = compare(mean, StepEnergy(**BASELINE))
    got = made.comparison()
    assert got.saving_percent == pytest.approx(20.0)
    assert got.slowdown_percent == pytest.approx(100 * (2.0125 / 1.9 - 1))
    assert got.saving_uncertainty_percent == pytest.approx(expected.saving_uncertainty_percent)
    assert got.slowdown_uncertainty_percent == pytest.approx(expected.slowdown_uncertainty_percent)
    told = bill_lines(made, Tariff())[0]
    found = re.sub(r"[+]- \d+[.]\d+", "+- ?", told)
    assert found == (
        "against the job's own baseline: a step takes 2.013 s (5.92 +- ? % more time, within "
        "noise) and 100 J a GPU (20.00 +- ? % less energy)"
    )


@pytest.mark.parametrize(
    ("backends", "facts", "more"),
    [
        (("none", "dry_run"), {"tokens_per_iteration": 1000}, "{tokens}; no clock was changed"),
        (("none", "nvml"), {"tokens_per_iteration": 1000}, "{tokens}"),
        (
            ("nvml", "nvml"),
            {"power": {"budget_w": None}},
            "; steps under a power budget, slower as asked, are among these",
        ),
        (("none", ""), {}, ""),
        (("none", "none"), {"tokens_per_iteration": "many"}, "; no clock was changed"),
    ],
)
def test_the_first_line_has_tokens_and_that_no_clock_was_changed_where_that_is_known(
    backends, facts, more
):
    made = bill(
        job(**facts),
        *(
            entry
            for gpu, backend in enumerate(backends)
            for entry in steady(gpu, 100.0, baseline=BASELINE, clock_backend=backend)
        ),
    )
    told = bill_lines(made, Tariff())[0].split("less energy)")[1]
    assert told == more.format(tokens="; a token 2.012 ms and 200 mJ on 2 GPUs")


LATER = {**BASELINE, "time_s": 3.8, "energy_j": 250.0}


def test_each_step_is_compared_with_the_baseline_that_was_in_force():
    """Both halves of a job save a fifth, at another length of sequences; so do both starts."""
    entries = []
    for start, baseline in enumerate([BASELINE, LATER]):
        step = {"duration_s": baseline["time_s"], "run": f"a {STARTS[start]}", "baseline": baseline}
        energy_j = 0.8 * baseline["energy_j"]
        entries += [
            window(gpu, 4 * start + i, energy_j, **step) for gpu in (0, 1) for i in range(4)
        ]
    made = bill(*entries)
    for got in (made.comparison(), made.snapshot().comparison()):
        assert got.saving_percent == pytest.approx(20.0)
        assert got.slowdown_percent == pytest.approx(0.0, abs=1e-9)
        assert got.slowdown_uncertainty_percent < 2, "that sequences grow is no scatter"


def test_what_all_starts_have_saved_is_the_sum_of_what_each_has():
    """A job that is restarted has as many GPUs, and more steps."""

    def saved(starts):
        step = {"duration_s": 1.9, "baseline": BASELINE}
        made = bill(*(
            window(gpu, 50 * start + i, 100.0, run=f"a {STARTS[start]}", **step)
            for start in starts for gpu in (0, 1) for i in range(50)
        ))  # fmt: skip
        assert made.steps("steady").iterations == made.comparison().iterations
        return bill_lines(made, Tariff())[1].split(" +- ")[0]

    assert saved([0]) == "in 50 such steps: 0.694"
    assert saved([0, 1]) == "in 100 such steps: 1.389"


def test_steps_without_a_baseline_are_in_no_saving():
    """Of one run that only measures, and of the steps before a baseline could be measured."""
    known = [window(0, i, 100.0, baseline=BASELINE, run="envpipe") for i in range(4)]
    others = [window(0, i, 500.0, run="baseline") for i in range(4)]
    told = job(baseline=BASELINE)  # as of an earlier start: lines say their own
    damaged = window(0, 9, 500.0, baseline={**BASELINE, "time_s": "1.9"}, run="envpipe")
    assert bill(*others, *known, damaged).comparison().saving_percent == pytest.approx(20.0)
    assert bill(*others, damaged).comparison() is None
    assert bill(told, *others).comparison() is None


@pytest.mark.parametrize(
    ("fact", "words"), [("level", ("observe", "order")), ("objective", ("energy", "time"))]
)
def test_steps_of_a_start_that_asked_for_something_else_are_no_part_of_a_saving(fact, words):
    """Who looks first and then turns EnvPipe on, in one folder, wants what it saves."""
    looks, saves = (job(**{fact: word}, type="optimal") for word in words)
    starts = [
        [window(0, i, run=f"a {start}", phase="steady", energy_j=energy_j) for i in range(3)]
        for start, energy_j in zip(STARTS, (40.0, 30.0), strict=True)
    ]
    alone = bill(saves, *starts[1]).steps("steady")
    assert bill(looks, *starts[0], saves, *starts[1]).steps("steady") == alone
    assert bill(looks, *starts[0], saves, *starts[1]).snapshot().steps("steady") == alone
    other_node = [{**one, "node": "n1", "gpu_uid": "GPU-n1"} for own in starts for one in own]
    both = bill(*other_node, looks, *starts[0], saves, *starts[1])
    assert both.steps("steady").energy_j == 30.0, "notes that come last say the same"
    again = bill(saves, *starts[0], job(**{fact: words[1]}), *starts[1])
    assert again.steps("steady").energy_j == pytest.approx(35.0), "a restart of the same job"


def test_a_single_step_tells_a_saving_and_not_how_sure_it_is():
    got = bill(window(0, 0, 100.0, baseline=BASELINE)).comparison()
    assert got.saving_percent == pytest.approx(20.0)
    assert got.saving_uncertainty_percent is None


@pytest.mark.parametrize(
    "entries",
    [
        [window()],
        [window(baseline={"step_s": 1.0})],  # of another version
        *[[window(baseline={**BASELINE, "time_s": bad})] for bad in (0.0, 10**400)],
        [window(baseline=[1, 2])],
        [window(phase="warm-up", baseline=BASELINE)],
        [window(0, baseline=BASELINE), window(1, None)],  # one GPU does not tell its steps
        [window(baseline=BASELINE), job(level="observe")],  # what differs is chance
    ],
)
def test_no_saving_is_told_where_one_side_is_not_known(entries):
    made = bill(*entries)
    assert made.comparison() is None
    assert bill_facts(made, Tariff())["comparison"] is None
    assert not any("baseline" in line for line in bill_lines(made, Tariff()))


# Nodes ---------------------------------------------------------------------------------------


def test_a_node_that_was_lost_and_begins_again_leaves_a_gap():
    entries = [note("begun", "n1"), note("begun"), window(), note("begun"), note("ended")]
    made = bill(*entries, note("unheard-of", "n1"), note("begun"), note("ended"))
    assert made.nodes["n0"] == NodeBill(agent=True, lost=1)
    assert made.nodes["n1"] == NodeBill(agent=True, running=True)
    gap = "was lost and started again: its energy between them is not in the bill"
    lost = "was lost: its energy up to its last line is in the bill"
    assert made.missing() == [f"n1 {lost}", f"n0 {gap}"]
    made = bill(*entries, note("begun", "n1"), note("begun"))
    assert made.missing() == [f"n0 {lost}", f"n1 {lost}", f"n0 {gap}", f"n1 {gap}"]


def test_gpus_that_sent_nothing_are_counted():
    entries = [job(num_gpus=4), window(0), window(1)]
    assert bill(*entries).missing() == ["2 of 4 GPUs sent nothing"]
    assert bill(*entries, window(2), window(3)).missing() == []
    assert bill(job(num_gpus=4)).missing() == ["4 of 4 GPUs sent nothing"]
    last = bill(job(num_gpus=4, model="a"), window(), job(num_gpus=1))
    assert (last.facts, last.missing()) == ({"num_gpus": 1, "model": "a"}, [])


@pytest.mark.parametrize(
    "bad",
    ["x", [1], {"a": 1}, None, -5, 0, True, math.nan, math.inf, pytest.param(10**400, id="huge")],
)
def test_facts_that_make_no_sense_spoil_no_bill(bad):
    names = ("num_gpus", "tokens_per_iteration", "samples_per_iteration", "baseline")
    names += ("model", "type", "microbatch_size", "notes")
    made = bill(window(), window(0, 0, phase="warm-up"), job(**dict.fromkeys(names, bad)))
    assert made.per_unit() == {"iteration": 200}
    assert made.missing() == []
    show_bill(made, Tariff(), Console(file=io.StringIO()))
    bill_facts(made, Tariff())
    assert bill(window(), note("job", facts=bad), note("job"), note("unheard-of")).facts in (
        {},
        bad,
    )
