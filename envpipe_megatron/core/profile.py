"""Profiles: time and energy of each (stage, instruction, frequency), and their files.

The CSV is Zeus's and lowtime's, `stage,instruction,frequency,time,energy` with MHz, s and J for one
GPU and one microbatch, its columns in any order. A column `energy_uncertainty_j` may follow (the
standard uncertainty, empty if not known); others are kept out. Zeus writes a row for each
`rank`: a stage's time is that of its slowest GPU, for which the others wait, and its energy the
mean of its GPUs. A sidecar JSON of the same name holds what else was measured about the job.
"""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.core.fields import (
    AMOUNT,
    FREQUENCY,
    MAX_FREQUENCY_MHZ,
    Number,
    Row,
    read_table,
)
from envpipe_megatron.core.schedule import Kind
from envpipe_megatron.core.sidecar import Sidecar, read_sidecar, sidecar_path
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import replace_files

COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
_RANK = "rank"
_UNCERTAINTY = "energy_uncertainty_j"
#: Mean power of a unit. A GPU draws more than the first when idle; none draws nearly the second.
_POWERS_W = (5.0, 5000.0)

logger = logging.getLogger(__name__)


class ProfileError(EnvPipeError):
    """A profile or sidecar that is not readable or not complete."""


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """What one unit costs at one frequency, of one GPU and microbatch, with its uncertainty."""

    frequency_mhz: int
    time_s: float
    energy_j: float
    energy_uncertainty_j: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.frequency_mhz < MAX_FREQUENCY_MHZ and 0 < self.time_s < math.inf) or not (
            0 <= self.energy_j < math.inf
        ):
            raise ProfileError(
                "A profile row needs a frequency (MHz) that a GPU has, a time (s) above 0 and an "
                "energy (J) of at least 0",
                value=(self.frequency_mhz, self.time_s, self.energy_j),
            )
        known = self.energy_uncertainty_j
        if known is not None and not 0 <= known < math.inf:
            raise ProfileError("The uncertainty of a row's energy is at least 0", value=known)

    def per_chunk(self, num_chunks: int) -> ProfileRow:
        """The row of one of `num_chunks` equal parts of the unit."""
        known = self.energy_uncertainty_j
        return ProfileRow(
            self.frequency_mhz,
            self.time_s / num_chunks,
            self.energy_j / num_chunks,
            None if known is None else known / num_chunks,
        )


@dataclass(frozen=True)
class Profile:
    """A complete profile: at least one row for every stage and instruction.

    Args:
        rows: for each stage and kind, the rows with the highest frequency first.
        sha256: hash of the file's bytes, or of the CSV that `write` would make.
        source: where it came from, for messages.
        interpolates: whether units may run between profiled clocks. Time and energy are then linear
            in the clock from one row to the next: a convex mixture of the two, so a lower bound
            over their convex hull holds for it too.
    """

    rows: tuple[Mapping[Kind, tuple[ProfileRow, ...]], ...]
    sha256: str
    source: str
    sidecar: Sidecar
    interpolates: bool = False

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, p."""
        return len(self.rows)

    @cached_property
    def _by_frequency(self) -> dict[tuple[int, Kind, int], ProfileRow]:
        return {
            (stage, kind, row.frequency_mhz): row
            for stage, kinds in enumerate(self.rows)
            for kind, rows in kinds.items()
            for row in rows
        }

    def row(self, stage: int, kind: Kind, frequency_mhz: int) -> ProfileRow:
        """The row of a stage, kind and frequency; ProfileError if that was not profiled."""
        found = self._by_frequency.get((stage, kind, frequency_mhz))
        if found is None:
            listed = ", ".join(str(row.frequency_mhz) for row in self.rows[stage][kind])
            raise ProfileError(
                f"{self.source}: stage {stage} {kind.value} was not profiled at this "
                "frequency (MHz)",
                value=frequency_mhz,
                remedy=f"Profiled there: {listed}.",
            )
        return found

    @cached_property
    def optimal_frequency_mhz(self) -> tuple[int, ...]:
        """For each stage, the frequency at the bottom of its energy valley.

        The one with the least energy of one forward plus one backward (Choi et al., ATC'23, section
        3.2); of equal ones the highest. ProfileError: forward and backward have none in common.
        """
        optimal = []
        for stage, kinds in enumerate(self.rows):
            backward_j = {row.frequency_mhz: row.energy_j for row in kinds[Kind.BACKWARD]}
            both = [
                (row.energy_j + backward_j[row.frequency_mhz], -row.frequency_mhz)
                for row in kinds[Kind.FORWARD]
                if row.frequency_mhz in backward_j
            ]
            if not both:
                raise ProfileError(
                    f"{self.source}: stage {stage} has no frequency that both its forward and its "
                    "backward were profiled at, so it has no energy valley",
                    remedy="Profile both at the same frequencies.",
                )
            optimal.append(-min(both)[1])
        return tuple(optimal)

    def for_chunks(self, num_chunks: int) -> Profile:
        """The profile of one of `num_chunks` chunks of each stage.

        A profile without chunks gives each of V chunks 1/V of its stage's time and energy; one
        measured with another number is refused (ProfileError).
        """
        if num_chunks == self.sidecar.num_chunks:
            return self
        if self.sidecar.num_chunks != 1:
            raise ProfileError(
                f"{self.source} was measured with {self.sidecar.num_chunks} chunks a stage",
                value=num_chunks,
                remedy="Plan for as many chunks, or profile without chunks.",
            )
        rows = tuple(
            {kind: tuple(row.per_chunk(num_chunks) for row in rows) for kind, rows in kinds.items()}
            for kinds in self.rows
        )
        return replace(self, rows=rows, sidecar=replace(self.sidecar, num_chunks=num_chunks))

    def lookup(
        self, frequency_mhz: IntArray, is_backward: BoolArray
    ) -> tuple[FloatArray, FloatArray]:
        """Time (s) and energy (J) of each unit, [num_stages, units_per_stage] as the arguments.

        ProfileError: a frequency that was not profiled for that stage and kind, or where the
        profile interpolates, one above or below all that were.
        """
        time_s = np.empty(frequency_mhz.shape)
        energy_j = np.empty(frequency_mhz.shape)
        for stage in range(frequency_mhz.shape[0]):
            for kind, mask in (
                (Kind.FORWARD, ~is_backward[stage]),
                (Kind.BACKWARD, is_backward[stage]),
            ):
                wanted = frequency_mhz[stage][mask]
                clocks, times_s, energies_j = self.curves[stage, kind]
                at = np.searchsorted(clocks, wanted, side="right") - 1
                if self.interpolates:
                    known = (at >= 0) & (wanted <= clocks[-1])
                else:
                    known = clocks[at] == wanted
                if not known.all():
                    self.row(stage, kind, int(wanted[~known][0]))  # raises, and says why
                time_s[stage][mask] = np.interp(wanted, clocks, times_s)
                energy_j[stage][mask] = np.interp(wanted, clocks, energies_j)
        return time_s, energy_j

    @cached_property
    def curves(self) -> dict[tuple[int, Kind], FloatArray]:
        """By stage and kind: rows of frequencies (MHz), times (s), energies (J), lowest first."""
        return {
            (stage, kind): np.array(
                [(row.frequency_mhz, row.time_s, row.energy_j) for row in reversed(rows)]
            ).T
            for stage, kinds in enumerate(self.rows)
            for kind, rows in kinds.items()
        }

    def to_csv(self) -> str:
        """The table as CSV text."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        rows = self._by_frequency
        known = any(row.energy_uncertainty_j is not None for row in rows.values())
        writer.writerow([*COLUMNS, *([_UNCERTAINTY] if known else [])])
        for (stage, kind, _), row in rows.items():
            uncertainty = [row.energy_uncertainty_j] if known else []
            writer.writerow(
                [stage, kind.value, row.frequency_mhz, row.time_s, row.energy_j, *uncertainty]
            )
        return out.getvalue()

    def write(self, path: Path) -> None:
        """Write the CSV, and the sidecar beside it; both or none.

        ProfileError if the CSV has the sidecar's name, OSError if a file cannot be written.
        """
        if sidecar_path(path) == path:
            raise ProfileError(
                "A profile's sidecar is the .json of its name, so the profile itself cannot be",
                value=path,
                remedy="Call it .csv.",
            )
        replace_files({path: [self.to_csv()], sidecar_path(path): [self.sidecar.to_json_text()]})


def make_profile(
    rows: Iterable[tuple[int, Kind, ProfileRow]], *, source: str, sidecar: Sidecar | None = None
) -> Profile:
    """A checked profile from rows in any order; ProfileError if a kind of a stage has none."""
    table: dict[int, dict[Kind, list[ProfileRow]]] = {}
    for stage, kind, row in rows:
        known = table.setdefault(stage, {}).setdefault(kind, [])
        if any(other.frequency_mhz == row.frequency_mhz for other in known):
            raise ProfileError(
                f"{source} has two rows for stage {stage} {kind.value} at this frequency (MHz)",
                value=row.frequency_mhz,
                remedy="Keep one.",
            )
        known.append(row)
    if not table or min(table) < 0:
        raise ProfileError(
            f"{source} has no rows, or a stage below 0",
            remedy="A profile lists every stage and instruction.",
        )
    stages: list[dict[Kind, tuple[ProfileRow, ...]]] = []
    for stage in range(max(table) + 1):
        kinds: dict[Kind, tuple[ProfileRow, ...]] = {}
        for kind in Kind:
            if kind not in table.get(stage, {}):
                raise ProfileError(
                    f"{source} has no row for stage {stage} {kind.value}",
                    remedy=f"Profile the forward and the backward of stages 0 to {max(table)}.",
                )
            kinds[kind] = tuple(
                sorted(table[stage][kind], key=lambda r: r.frequency_mhz, reverse=True)
            )
        stages.append(kinds)
    profile = Profile(tuple(stages), "", source, sidecar or Sidecar())
    return replace(profile, sha256=hashlib.sha256(profile.to_csv().encode()).hexdigest())


def read_profile(path: Path) -> Profile:
    """Read a profile CSV, and its sidecar if there is one; a warning names powers that no GPU has.

    EnvPipeError names file, line and value of what is wrong.
    """
    content, lines = read_table(path, "profile", COLUMNS, (_RANK, _UNCERTAINTY), ProfileError)
    first_line: dict[tuple[int, Kind, int, str], str] = {}
    by_rank: dict[tuple[int, Kind, int], list[ProfileRow]] = {}
    implausible: list[tuple[float, str]] = []
    for line in lines:
        kind, row = read_unit(line)
        stage, rank = line.read("stage", Number(whole=True)), line.cells.get(_RANK, "")
        key = (stage, kind, row.frequency_mhz)
        if (*key, rank) in first_line:
            of_rank = f" of rank {rank}" if rank else ""
            raise ProfileError(
                f"{line.where}: a second row for stage {stage} {kind.value}{of_rank} at this "
                "frequency (MHz)",
                value=row.frequency_mhz,
                remedy=f"The first is {first_line[*key, rank]}; keep one.",
            )
        first_line[*key, rank] = line.where
        if not _POWERS_W[0] <= row.energy_j / row.time_s <= _POWERS_W[1]:
            implausible.append((row.energy_j / row.time_s, line.where))
        by_rank.setdefault(key, []).append(row)
    rows = [
        (stage, kind, _one_gpu(frequency_mhz, ranks))
        for (stage, kind, frequency_mhz), ranks in by_rank.items()
    ]
    profile = make_profile(rows, source=str(path))
    _check_powers(profile, implausible)
    beside = sidecar_path(path)
    sidecar = read_sidecar(beside, profile.num_stages) if beside.exists() else Sidecar()
    return replace(profile, sidecar=sidecar, sha256=hashlib.sha256(content).hexdigest())


def read_unit(line: Row) -> tuple[Kind, ProfileRow]:
    """A line's instruction, with its frequency, time and energy."""
    instruction = line.cells["instruction"]
    if instruction not in set(Kind):
        raise line.error(
            f"{line.where}: unknown instruction",
            value=instruction,
            remedy="Use forward or backward.",
        )
    uncertain = bool(line.cells.get(_UNCERTAINTY))
    row = ProfileRow(
        line.read("frequency", FREQUENCY, "MHz"),
        line.read("time", Number(positive=True), "s"),
        line.read("energy", AMOUNT, "J"),
        line.read(_UNCERTAINTY, AMOUNT, "J") if uncertain else None,
    )
    return Kind(instruction), row


def _check_powers(profile: Profile, implausible: Sequence[tuple[float, str]]) -> None:
    for stage, kinds in enumerate(profile.rows):
        if not any(row.energy_j for rows in kinds.values() for row in rows):
            raise ProfileError(
                f"{profile.source}: stage {stage} has no energy in any row",
                remedy="Energy is what a plan saves: give J of one GPU and one microbatch.",
            )
    if implausible:
        power_w, where = implausible[0]
        logger.warning(
            "%s: %.3g W, and %d more rows with powers that no GPU has (%g W to %g W). Times are in "
            "s, and energies in J of one GPU and one microbatch: correct the file if its are not.",
            where, power_w, len(implausible) - 1, *_POWERS_W,
        )  # fmt: skip


def _one_gpu(frequency_mhz: int, ranks: Sequence[ProfileRow]) -> ProfileRow:
    """One row from those of a stage's GPUs."""
    known = [row.energy_uncertainty_j for row in ranks if row.energy_uncertainty_j is not None]
    return ProfileRow(
        frequency_mhz,
        max(row.time_s for row in ranks),
        math.fsum(row.energy_j for row in ranks) / len(ranks),
        math.hypot(*known) / len(ranks) if len(known) == len(ranks) else None,
    )
