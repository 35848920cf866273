"""Lines of energy logs: what they say, what they may leave out, and what is none of them."""

import json
import math
import multiprocessing as mp
import os
import signal
from dataclasses import asdict
from pathlib import Path

import pytest

from envpipe_megatron.formats import energy
from envpipe_megatron.formats.bill import Bill, num_gpus
from envpipe_megatron.formats.energy import (
    EnergyLogs,
    EnergyNote,
    EnergyWindow,
    append_line,
    parse_line,
    read_energy_logs,
)
from envpipe_megatron.formats.energy_sums import LineSums, LogSums
from envpipe_megatron.formats.steps import StepEnergy

WINDOW = {
    "format": "envpipe-energy/1", "node": "n1", "gpu": "NVIDIA A100", "gpu_uid": "GPU-1a2b",
    "run": "mine", "rank": 0, "stage": 0, "phase": "steady", "first_iteration": 0,
    "last_iteration": 42, "begin_s": 812.5, "duration_s": 3.1, "energy_j": 870.2,
    "energy_uncertainty_j": 1.9, "compute_s": 2.4, "blocking_s": 0.5, "idle_s": 0.2,
}  # fmt: skip
LEAST = {"energy_j": 0, "duration_s": 1}


def parsed(data):
    return parse_line(json.dumps(data).encode())


def test_a_whole_line():
    assert parsed(WINDOW) == EnergyWindow(
        node="n1", gpu_uid="GPU-1a2b", gpu="NVIDIA A100", rank=0, stage=0, run="mine",
        phase="steady", first_iteration=0, last_iteration=42, energy_j=870.2, duration_s=3.1,
        energy_uncertainty_j=1.9, shares_s=(2.4, 0.5, 0.2), begin_s=812.5,
    )  # fmt: skip
    assert parsed(WINDOW).gpu_key == ("n1", "GPU-1a2b")
    assert parsed(WINDOW).line() == WINDOW


def test_the_least_that_a_line_can_say():
    assert parsed(LEAST) == EnergyWindow(
        "", "", "", None, None, "", "", None, None, 0.0, 1.0, None, None, None
    )
    assert parsed(LEAST | {"rank": 3, "begin_s": 0}).gpu_key == ("", "rank 3")
    assert parsed(LEAST | {"begin_s": 0}).begin_s == 0.0
    assert parsed(WINDOW | {"idle_s": None}).shares_s is None  # all three are known, or none


def test_a_note_keeps_all_its_fields():
    note = {"format": "envpipe-note/1", "node": "n1", "note": "job", "facts": {"model": "GPT"}}
    assert parsed(note) == EnergyNote("n1", "job", note)


@pytest.mark.parametrize(
    "data",
    [
        3,
        [],
        *[WINDOW | {"format": other} for other in ("envpipe-energy/2", None)],
        *[
            WINDOW | {field: bad}
            for field in ("rank", "stage", "first_iteration", "last_iteration")
            for bad in (-1, 0.5, True, "0", 2**31, 10**400)
        ],
        *[
            WINDOW | {field: bad}
            for field in ("energy_j", "duration_s", "energy_uncertainty_j", "compute_s", "begin_s")
            for bad in (-0.5, float("inf"), float("nan"), True, "1", 1e200, 10**400)
        ],
        *[
            WINDOW | {field: bad}
            for field in ("node", "gpu", "gpu_uid", "run", "phase")
            for bad in (7, "\ud800")
        ],
        WINDOW | {"stage": 10_000},
        *[{field: value} for field, value in LEAST.items()],
        *[
            {"format": "envpipe-note/1", field: bad}
            for field in ("node", "note")
            for bad in (7, "\udcff")
        ],
        {"format": "envpipe-note/1", "facts": {"notes": ["\ud800"]}},
    ],
)  # fmt: skip
def test_what_is_no_line_of_an_energy_log_is_refused(data):
    with pytest.raises(ValueError):  # noqa: PT011 - of any text: readers count these lines
        parsed(data)


def written(tmp_path, lines):
    path = tmp_path / "energy.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def steps_of_gpus(count, num_gpus=2, **fields):
    """Two seconds each, of which every tenth is one at the highest clock."""
    return [
        WINDOW
        | {"gpu_uid": f"GPU-{gpu}", "rank": gpu, "phase": "steady" if i % 10 else "baseline"}
        | {"first_iteration": i, "last_iteration": i, "begin_s": 5.0 + 2 * i, "duration_s": 2.0}
        | {"energy_j": 100.0 + i % 7, **fields}
        for i in range(count)
        for gpu in range(num_gpus)
    ]


def test_of_large_logs_sums_are_read_and_make_the_same_bill(tmp_path, monkeypatch):
    """Lines that are there twice count once, also in another file; starts stay apart."""
    lines = steps_of_gpus(2000)
    again = [
        {"format": "envpipe-note/1", "node": "n1", "note": "begun"},
        *steps_of_gpus(500, run="b"),
    ]
    path = written(tmp_path, [*lines, *again, *lines[:100]])
    whole = read_energy_logs([path])
    monkeypatch.setattr(energy, "_LARGE_BYTES", 10_000)
    logs = read_energy_logs([path, path])
    assert (logs.repeated, logs.unreadable) == (100 + len(lines) + len(again) + 100, ())
    assert len(logs.lines) < 1500 < len(whole.lines)
    one, other = Bill(logs.lines), Bill(whole.lines)
    assert one.total().energy_j == pytest.approx(other.total().energy_j, rel=1e-9)
    assert one.total().energy_uncertainty_j == pytest.approx(other.total().energy_uncertainty_j)
    assert one.iterations.keys() == other.iterations.keys()
    assert one.num_iterations == other.num_iterations
    for phase in ("steady", "baseline"):
        assert one.steps(phase).iterations == other.steps(phase).iterations
        assert one.steps(phase).energy_j == pytest.approx(other.steps(phase).energy_j)


def test_sums_of_starts_under_one_agent_lie_between_its_notes():
    """The second start asks for something else: the first one's steps are not this job's."""
    asked = {"format": "envpipe-note/1", "node": "n1", "note": "job"}
    entries, made = [], []
    for number, level in enumerate(["observe", "order"]):
        run = f"a 2026-03-0{number + 1}T10:00:00.000+00:00"
        entries += [
            asked | {"facts": {"level": level}},
            *steps_of_gpus(20, run=run, energy_j=number),
        ]
    sums = LogSums(made.append)
    for entry in map(parsed, entries):
        sums.add(entry)
    sums.flush()
    one, other = (Bill(lines).steps("steady") for lines in (made, map(parsed, entries)))
    assert one.energy_j == other.energy_j == 1.0


def test_steps_of_a_start_on_another_number_of_gpus_are_no_steps_of_the_last_one():
    """Without an agent, nothing but the lines says how many there are; the small start's are last.

    Of 100 steps on four GPUs and 10,000 on two, energy was said of four, twice too much.
    """
    small, large = "2026-03-02T10:00:00.000+00:00", "2026-03-01T10:00:00.000+00:00"
    bill = Bill()
    for run, ranks, steps in ((small, 2, 10_000), (large, 4, 100)):
        for rank in range(ranks):
            of_rank = {"run": run, "rank": rank, "gpu_uid": f"GPU-{rank}", "num_ranks": ranks}
            some = {"last_iteration": steps - 1, "duration_s": steps, "energy_j": 80.0 * steps}
            bill.add(parsed(WINDOW | of_rank | some))
    assert (num_gpus(bill.of_phase("steady")), bill.steps("steady").iterations) == (2, 10_000)
    assert (bill.left_out, bill.total().energy_j) == ({large}, 80.0 * 20_400)
    for name in ("a", "z"):  # jobs of their own, whose logs are added to these
        bill.add(parsed(WINDOW | {"run": f"{name} {large}", "rank": 0, "num_ranks": 1}))
    assert bill.left_out == {large}


def test_steps_of_several_baselines_have_a_line_each():
    written = []
    sums = LineSums(written.append, share=math.inf, longest_s=math.inf)
    known = [StepEnergy(9, seconds, 0.01, 100 * seconds, None) for seconds in (1.0, 2.0)]
    for iteration, baseline in enumerate([known[0]] * 3 + [known[1]]):
        place = {"first_iteration": iteration, "last_iteration": iteration}
        sums.add(parsed(WINDOW | place | {"baseline": asdict(baseline)}))
    sums.flush()
    assert [window.baseline for window in written] == known
    assert [(each.first_iteration, each.last_iteration) for each in written] == [(0, 2), (3, 3)]


def test_files_without_an_energy_log_are_told_apart_from_empty_ones(tmp_path):
    good, empty, foreign = (tmp_path / name for name in ("good", "empty", "foreign"))
    good.write_text(json.dumps(LEAST))
    empty.write_text("\n")
    foreign.write_text("stage,instruction\n")
    assert len(read_energy_logs([empty, good, empty]).lines) == 1
    logs = read_energy_logs([foreign, good, empty])
    assert (len(logs.lines), logs.unreadable, logs.foreign) == (1, (), (foreign,))
    assert read_energy_logs([empty]) == EnergyLogs((), 0, ())


def test_others_may_read_a_log_and_not_write_it(tmp_path):
    before = os.umask(0o022)
    append_line(tmp_path / "energy.jsonl", WINDOW)
    os.umask(before)
    assert (tmp_path / "energy.jsonl").stat().st_mode & 0o777 == 0o644
    assert read_energy_logs([tmp_path / "energy.jsonl"]).windows == (parsed(WINDOW),)


def _write_forever(path: Path, rank: int) -> None:
    while True:
        append_line(path, {"rank": rank, "padding": "x" * 5000})


def test_file_is_usable_after_its_writers_were_killed(tmp_path):
    path = tmp_path / "log"
    context = mp.get_context("fork")
    writers = [context.Process(target=_write_forever, args=(path, rank)) for rank in range(2)]
    for writer in writers:
        writer.start()
    ready = [b'"rank": %d' % rank for rank in range(2)]  # a busy machine may start one late
    while not path.exists() or not all(mark in path.read_bytes() for mark in ready):
        writers[0].join(0.005)
        assert writers[0].is_alive()
    while path.stat().st_size < 200_000:
        writers[0].join(0.005)
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    append_line(path, {"rank": 2})
    lines = [line for line in path.read_text().splitlines() if line]
    whole = [line for line in lines if line.endswith("}") and line.count("{") == 1]
    assert len(whole) >= len(lines) - 2  # each writer may have been in the middle of one
    assert {json.loads(line)["rank"] for line in whole} == {0, 1, 2}


def test_line_that_was_joined_to_a_torn_one_is_written_again(tmp_path, monkeypatch):
    """The other writer is killed between this one's look at the file and its write."""
    path = tmp_path / "log"
    append_line(path, {"rank": 0})
    write, torn = os.write, [b'{"rank": 1, "ener']

    def write_after_a_torn_one(descriptor: int, data: bytes) -> int:
        if torn:
            write(descriptor, torn.pop())
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_after_a_torn_one)
    append_line(path, {"rank": 2})
    first, joined, last = path.read_text().splitlines()
    assert (first, last) == ('{"rank": 0}', '{"rank": 2}')
    assert joined == '{"rank": 1, "ener{"rank": 2}'


def test_a_line_that_lacks_its_end_alone_is_written(tmp_path, monkeypatch):
    """The disk was full by one byte. An error would have its energy in the next line, too."""
    path = tmp_path / "log"
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:-1]))
        append_line(path, {"energy_j": 100.0, "duration_s": 1.0})
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:-2]))
        with pytest.raises(OSError, match="No space"):
            append_line(path, {"energy_j": 150.0, "duration_s": 1.5})
    append_line(path, {"energy_j": 150.0, "duration_s": 1.5})
    logs = read_energy_logs([path])
    assert [window.energy_j for window in logs.windows] == [100.0, 150.0]
    assert logs.unreadable == (f"{path}:2",)
