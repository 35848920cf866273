"""Tables of torch.distributed.pipelining: what is an order there is one here, and comes back."""

import csv
import io
import random
from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace

import pytest

from envpipe_megatron.core.kinds import ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Placement
from envpipe_megatron.formats.torch_csv import read_torch_csv, torch_csv


@cache
def of_torch() -> ModuleType:
    """Takes seconds to import, which no worker pays that only collects."""
    from torch.distributed.pipelining import schedules

    return schedules


def read(tmp_path, text):
    path = tmp_path / "order.csv"
    path.write_text(text)
    return read_torch_csv(path)


def rank_of(virtual_stage, ranks, placement):
    style = "v" if placement is Placement.V else "loop"
    return of_torch().generate_stage_to_rank_mapping(ranks, 4 * ranks, style)[virtual_stage]


def random_table(rng):
    """Rows of cells, each unit once on its rank, perhaps in an order that cannot run."""
    ranks, chunks, microbatches = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 3)
    placement = rng.choice([Placement.LOOPED, Placement.V])
    split = rng.random() < 0.6
    units = []
    for virtual_stage, microbatch in product(range(ranks * chunks), range(microbatches)):
        letters = "IW" if split and rng.random() < 0.7 else "B"
        units += [(virtual_stage, letter, microbatch) for letter in "F" + letters]
    # Mostly those that are ready, one after the other; at times any, which seldom can run.
    rows, done = [[] for _ in range(ranks)], set()
    while units:
        ready = [unit for unit in units if is_ready(unit, done, ranks * chunks)]
        unit = rng.choice(units if rng.random() < 0.02 or not ready else ready)
        units.remove(unit)
        done.add(unit)
        rows[rank_of(unit[0], ranks, placement)].append("{}{}{}".format(*unit))
    return rows, chunks, microbatches, placement


def is_ready(unit, done, virtual_stages):
    stage, letter, microbatch = unit
    if letter == "F":
        return stage == 0 or (stage - 1, "F", microbatch) in done
    if letter == "W":
        return (stage, "I", microbatch) in done
    last = stage == virtual_stages - 1
    gradient = any((stage + 1, of, microbatch) in done for of in "BI")
    return (stage, "F", microbatch) in done and (last or gradient)


def torch_runs(rows, virtual_stages, microbatches):
    """Return True if torch finds an order for its messages."""
    actions = {rank: [of_torch()._Action.from_str(cell) for cell in row] for rank, row in
               enumerate(rows)}  # fmt: skip
    try:
        ranks = of_torch()._validate_schedule(actions, len(rows), virtual_stages, microbatches)
        of_torch()._add_send_recv(actions, ranks.__getitem__, virtual_stages)
    except AssertionError:
        return False
    return True


@pytest.mark.xdist_group("megatron")  # whose worker imports the same
def test_an_order_of_torch_is_one_here_and_comes_back(tmp_path):
    rng = random.Random(0)
    seen = set()
    for _ in range(400):
        rows, chunks, microbatches, placement = random_table(rng)
        table = io.StringIO()
        # Bubbles anywhere.
        padded = [[c for cell in row for c in [""] * rng.randint(0, 1) + [cell]] for row in rows]
        csv.writer(table).writerows(padded)
        runs, last = torch_runs(rows, chunks * len(rows), microbatches), chunks * len(rows) - 1
        try:
            order = read(tmp_path, table.getvalue())
        except ScheduleError:
            assert not runs, rows
            seen.add("refused")
            continue
        assert runs, rows
        assert (order.num_stages, order.num_microbatches, order.num_chunks) == (
            len(rows), microbatches, chunks,
        )  # fmt: skip
        if len(rows) > 1 and chunks > 1:
            assert order.placement is placement
        losses = [cell for row in rows for cell in row if cell.startswith(f"{last}F")]
        if losses == sorted(losses):
            assert [*csv.reader(io.StringIO(torch_csv(order)))] == rows
        else:
            with pytest.raises(ScheduleError, match="out of turn"):
                torch_csv(order)
        seen.add((order.placement, order.split))
    assert len(seen) == 1 + 2 * 2


@pytest.mark.xdist_group("megatron")
@pytest.mark.parametrize(
    ("name", "placement", "peak"),
    [
        ("ScheduleLoopedBFS", Placement.LOOPED, (16,) * 4),
        ("ScheduleInterleaved1F1B", Placement.LOOPED, (11, 9, 7, 5)),
        ("ScheduleInterleavedZeroBubble", Placement.LOOPED, (8,) * 4),
        ("ScheduleZBVZeroBubble", Placement.V, (8,) * 4),
        ("ScheduleDualPipeV", Placement.V, (9,) * 4),
    ],
)
def test_what_torch_writes_of_its_own_schedules(tmp_path, name, placement, peak):
    stages = [
        SimpleNamespace(num_stages=8, group_size=4, group_rank=0, stage_index=at, submod=None)
        for at in (0, 7 if placement is Placement.V else 4)
    ]
    for stage in stages:
        stage.is_last = stage.stage_index == 7
    schedule = getattr(of_torch(), name)(stages, 8, loss_fn=print)
    path = tmp_path / "order.csv"
    schedule._dump_csv(str(path), format="compute_only")
    order = read_torch_csv(path)
    assert (order.placement, order.peak_in_flight) == (placement, peak)
    with path.open(newline="") as file:
        cells = [list(filter(None, row)) for row in csv.reader(file)]
    assert [*csv.reader(io.StringIO(torch_csv(order)))] == cells


def test_units_that_run_as_one(tmp_path):
    text = "0F0,1F0,0F1,(1F1;1B0)OVERLAP_F_B,0I0,1I1,0W0,0B1,1W1\n"
    order = read(tmp_path, text)
    assert order.labels() == [
        ["F0.0", "F0.1", "F1.0", "F1.1+", "I0.1+", "W0.1", "I0.0", "I1.1", "W0.0", "I1.0+", "W1.0",
         "W1.1"],
    ]  # fmt: skip
    assert torch_csv(order) == text
    pairs = builders.interleaved(2, 4, 2, combined=True)
    assert read(tmp_path, torch_csv(pairs)).stages == pairs.stages
    assert "0F2,(0F3;2B0)OVERLAP_F_B" in torch_csv(pairs)


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            GOOD.replace("1F1", "1G1"),
            ["not a unit in line 2, column 3", "1G1", "compute_only", "1B0 [1G1]   1B1"],
        ),
        (GOOD.replace("1F1", "(1F1)OVERLAP_F_B"), ["line 2, column 3", "(2F1;1B0)OVERLAP_F_B"]),
        (GOOD.replace("1B0,1F1", "(1B0;1F1)OVERLAP_F_B"), ["not a unit in line 2, column 2"]),
        (GOOD.replace("1F1", "1F0"), ["Stage 1 lists a unit twice", "[F0]   B0 [F0]"]),
        (GOOD.replace("1F1,", ""), ["Stage 1 lacks a unit", "(got 'F1')"]),
        (GOOD.replace("1B1", "999999999B1"), ["are planned"]),
        (GOOD + "2F0,2B0,2F1,2B1,3F0,3B0,3F1,3B1", ["equally many", "3 ranks", "(got 4)"]),
        ("1F0,1B0\n0F0,0B0\n", ["virtual stage 1 is on the wrong rank in line 1, column 1"]),
        (GOOD.replace("1B0,1F1", "1F1,1B0").replace("0F1,0B0", "0B0,0F1"), ["deadlock", "F1 on"]),
        (GOOD.replace("1F0,1B0", "1B0,1F0"), ["order.csv", "runs B0 before F0"]),
        ("", ["lists no units"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, said):
    with pytest.raises(ScheduleError) as raised:
        read(tmp_path, text)
    for part in (*said, "order.csv"):
        assert part in str(raised.value)


@pytest.mark.parametrize("after", ["\n", "\n\n\n", "\r\n\r\n", " \n\t\n", ",,\n,,\n"])
def test_empty_lines_at_the_end_are_no_ranks(tmp_path, after):
    assert read(tmp_path, GOOD + after).stages == read(tmp_path, GOOD).stages
    with pytest.raises(ScheduleError, match="equally many on each of 3 ranks"):
        read(tmp_path, GOOD.replace("\n", "\n\n"))  # between ranks they are


def test_an_order_without_backwards_is_no_table():
    with pytest.raises(ScheduleError, match="Forwards only"):
        torch_csv(builders.whole_iteration(2))
