"""Profiles that are not measured: whose they are, and what the warm-up says of them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_rank import CLOCKS, MICROBATCHES, OWN, STAGES, TIMES_S, Rank, profile_of

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import PlanError
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.formats.job_file import StoredJob
from envpipe_megatron.runtime.job.measuring import known_profile
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.planning import read_files
from host_executor import make_record

TOP_MHZ = max(CLOCKS)


class Starting(Rank):
    """Stage 0 of a job, on one of its three replicas, and what the others measured.

    Args:
        path: of a profile; an earlier start's where it is `profile.csv`, else the user's.
        of_replicas: what the other replicas' medians are, by this one's.
        of_next: what the next stage's is, by this one's.
    """

    def __init__(
        self, path: Path, of_replicas: tuple[float, float] = (1.0, 1.0), of_next: float = 1.0
    ) -> None:
        kept = path.name == "profile.csv"
        options = JobOptions(num_microbatches=MICROBATCHES, profile=None if kept else path)
        replicas = [partial(scaled, by=by) for by in of_replicas]
        super().__init__(options, other=partial(scaled, by=of_next), replicas=replicas)
        self.path = path

    def has(self, profile: Profile) -> None:
        """It is the profile of an earlier start, or the user's."""
        if self.options.profile is None:
            self.folder.found = StoredJob(profile=profile)
        else:
            profile.write(self.path)
            self.state.given = read_profile(self.path), None

    def known(self, *records: Any, order: Schedule = OWN) -> Profile | None:
        self.own_order = order
        return known_profile(self, records)  # type: ignore[arg-type]


def scaled(own: Any, by: float) -> Any:
    return own * by if isinstance(own, np.ndarray) else own


def record(change: Callable[[FloatArray], Any] = lambda times_s: None) -> Any:
    """An iteration of stage 0 whose units take `TIMES_S`, but for what is changed."""
    times_s = np.where(OWN.is_backward[0], TIMES_S[Kind.BACKWARD], TIMES_S[Kind.FORWARD])
    change(times_s)
    ends_s = np.cumsum(times_s)
    return make_record((ends_s - times_s).tolist(), ends_s.tolist(), 0.0, ends_s[-1])


def slow(kind: Kind, share: float) -> Any:
    def change(times_s: FloatArray) -> None:
        times_s[OWN.is_backward[0] == (kind is Kind.BACKWARD)] *= 1 + share

    return record(change)


@pytest.fixture(params=["profile.csv", "mine.csv"])
def job(request, tmp_path) -> Starting:
    """One with a profile of an earlier start, and one whose user gave it."""
    starting = Starting(tmp_path / request.param)
    starting.has(profile_of())
    return starting


def test_without_any_none_is_known(tmp_path):
    starting = Starting(tmp_path / "profile.csv")
    assert starting.known(record()) is None
    assert starting.memory.stages is None


@pytest.mark.parametrize("knows", [False, True])
def test_memory_is_this_starts_but_for_what_the_user_says(job, knows):
    facts = Sidecar(activation_bytes=(1.0, 2.0), free_bytes=(3.0, 4.0)) if knows else Sidecar()
    job.has(replace(profile_of(), sidecar=facts))
    sidecar = job.known().sidecar
    users = knows and job.path.name == "mine.csv"
    assert sidecar.activation_bytes == ((1.0, 2.0) if users else (10.0, 20.0))
    assert sidecar.free_bytes == ((3.0, 4.0) if users else (100.0, 200.0))


def test_what_waits_between_parts_is_known_from_an_earlier_start(job):
    job.has(replace(profile_of(), sidecar=Sidecar(pending_bytes=(50.0, 60.0))))
    job.memory.waiting_bytes = (70.0,)
    assert job.known().sidecar.pending_bytes == (50.0, 60.0)
    earlier = job.path.name == "profile.csv"
    assert job.memory.waiting_bytes == ((50.0,) if earlier else (70.0,))


def test_a_profile_of_another_pipeline_is_refused(tmp_path):
    starting: Any = Starting(tmp_path / "mine.csv")
    profile_of(stages=3).write(starting.path)
    with pytest.raises(PlanError, match="3"):
        read_files(starting)


def test_files_that_went_after_options_were_read_end_no_job(tmp_path):
    starting: Any = Starting(tmp_path / "mine.csv")
    known = profile_of()
    starting.options = replace(starting.options, files_read=(known, None))
    read_files(starting)
    assert starting.state.given == (known, None)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record()],
        [slow(Kind.FORWARD, 0.029), slow(Kind.FORWARD, 0.029)],
        [slow(Kind.BACKWARD, -0.029)],
        [slow(Kind.BACKWARD, 0.5), record(), record()],  # an iteration with a hiccup
        [record(lambda times_s: np.multiply.at(times_s, [0, 7], 3.0))],  # units with one
    ],
)
def test_a_profile_that_the_warm_up_bears_out_is_used(job, records):
    assert job.known(*records).to_csv() == profile_of().to_csv()
    assert job.said == []
    assert job.options.profile or job.folder.found.profile


@pytest.mark.parametrize(
    ("kind", "share", "said"),
    [
        (Kind.FORWARD, 0.05, "at 1410 MHz stage 0 forward takes 105 ms, +5.0 % against its 100 ms"),
        (Kind.BACKWARD, -0.04, "stage 0 backward takes 192 ms, -4.0 % against its 200 ms"),
    ],
)
def test_one_that_it_contradicts_is_forgotten_unless_the_user_gave_it(job, kind, share, said):
    users = job.options.profile is not None
    profile = job.known(slow(kind, share), slow(kind, share))
    (told,) = job.said
    assert said in told
    # The next stage's are this one's, here.
    assert told.endswith("; 1 more kind(s) of units differ too")
    if users:
        assert profile.to_csv() == profile_of().to_csv()
        assert f"the profile {job.path} is used, but may not be one of this job" in told
        return
    assert profile is None
    assert "of an earlier start is not used" in told
    assert job.folder.found.profile is None
    assert job.known(record()) is None


@pytest.mark.parametrize(
    ("of_replicas", "of_next", "said"),
    [
        ((1.0, 1.2), 1.0, ""),
        ((1.2, 1.2), 1.0, "stage 0"),
        ((1.0, 1.0), 1.1, "stage 1 forward takes 110 ms, +10.0 %"),
    ],
)
def test_medians_of_replicas_count_on_any_stage(tmp_path, of_replicas, of_next, said):
    starting = Starting(tmp_path / "profile.csv", of_replicas, of_next)
    starting.has(profile_of())
    assert (starting.known(record()) is None) is bool(said)
    assert said in "".join(starting.said)


def test_what_cannot_be_compared_contradicts_nothing(job):
    """Another highest clock, or other chunks, which planning refuses."""
    job.gpu.supported_frequencies_mhz = (1200, 1500)
    assert job.known(slow(Kind.FORWARD, 0.5)) is not None
    job.gpu.supported_frequencies_mhz = (1200, TOP_MHZ)
    of_chunks = replace(profile_of(), sidecar=Sidecar(num_chunks=2))
    job.has(of_chunks)
    assert job.known(slow(Kind.FORWARD, 0.5)) is not None
    assert job.said == []


def test_chunks_and_pairs_are_compared_each_for_itself(tmp_path):
    order = builders.interleaved(STAGES, 8, 2, combined=True)
    kinds = (*WHOLE, Kind.COMBINED)
    rows = tuple(
        {kind: profile_of().rows[0][WHOLE[min(place, 1)]] for place, kind in enumerate(kinds)}
        for _ in range(2 * STAGES)
    )
    sidecar = Sidecar(num_chunks=2)
    keys = order.unit_keys(2, kinds)[0]
    assert order.combined[0].any()
    times_s = np.where(keys % 3 == 0, TIMES_S[Kind.FORWARD], TIMES_S[Kind.BACKWARD])
    times_s[keys < 0] = 0.0
    starting = Starting(tmp_path / "profile.csv")
    starting.has(replace(profile_of(), rows=rows, sidecar=sidecar, listed_chunks=2))
    for slower, said in ((None, ""), (5, "stage 0 chunk 1 combined takes 220 ms")):
        times_s[keys == slower] *= 1.1
        ends_s = np.cumsum(times_s)
        ran = make_record((ends_s - times_s).tolist(), ends_s.tolist(), 0.0, 1.0)
        assert (starting.known(ran, order=order) is None) is bool(said)
        assert said in "".join(starting.said)
