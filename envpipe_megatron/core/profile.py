"""Profiles: time and energy of each (stage, chunk, instruction, frequency), and their files.

The CSV is Zeus's and lowtime's, `stage,instruction,frequency,time,energy` with MHz, s and J for one
GPU and one microbatch, its columns in any order. Columns `energy_uncertainty_j` (the standard
uncertainty, empty where it is not known) and `chunk` may follow; others are kept out. With `chunk`,
each row is of that virtual stage; without, all chunks are alike. An instruction is the
name of a kind of unit: forwards and backwards always, both parts of a backward where that can be
split, and `combined` (a backward of the chunk, and the forward that runs as one with it) where
there are chunks. Zeus writes a row for each `rank`: a stage's time is that of its slowest GPU, for
which the others wait, its energy the mean of its GPUs. A sidecar JSON of the same name holds what
else was measured about the job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.fields import Fields
from envpipe_megatron.core.kinds import SPLIT, WHOLE, Kind
from envpipe_megatron.core.profile_rows import (
    LISTED,
    NOTHING_S,
    ProfileError,
    ProfileRow,
    SplitBackward,
    in_order,
    read_rows,
    row_name,
    rows_text,
    whole_backwards,
)
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar, read_sidecar, sidecar_of_fields, sidecar_path
from envpipe_megatron.files import replace_files


@dataclass(frozen=True)
class Profile:
    """A complete profile: at least one row for every stage, listed chunk and instruction.

    Args:
        rows: for each part, of each kind the rows with the highest frequency first. A part is a
            stage, or chunk `c` of stage `s` at `s * listed_chunks + c`. All parts have the same
            kinds, in the same order.
        sha256: hash of the file's bytes, or of the CSV that `write` would make.
        source: where it came from, for messages.
        interpolates: whether units may run between profiled clocks. Time and energy are then linear
            in the clock from one row to the next: a convex mixture of the two, so a lower bound
            over their convex hull holds for it too.
        listed_chunks: 1, or the sidecar's number of chunks where each has rows of its own.
        assumed: what rows of split backwards were made by, if they were not measured.
    """

    rows: tuple[Mapping[Kind, tuple[ProfileRow, ...]], ...]
    sha256: str
    source: str
    sidecar: Sidecar
    interpolates: bool = False
    listed_chunks: int = 1
    assumed: SplitBackward | None = None

    def __post_init__(self) -> None:
        if self.listed_chunks not in (1, self.sidecar.num_chunks):
            raise ProfileError(
                f"{self.source} lists {self.listed_chunks} chunks a stage, and its sidecar says "
                f"{self.sidecar.num_chunks}",
                remedy="Correct num_chunks in the sidecar, or leave it out.",
            )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that each part has rows of."""
        return tuple(self.rows[0])

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, p."""
        return len(self.rows) // self.listed_chunks

    @property
    def weight_shares(self) -> FloatArray:
        """[num_stages, 1] what a pending weight gradient holds, in microbatches in flight.

        It is 1 where that is not known: activations are held until the weight gradient is there.
        """
        pending, one = self.sidecar.pending_bytes, self.sidecar.activation_bytes
        shares = np.ones((self.num_stages, 1))
        if pending is not None and one is not None and all(one):
            shares[:, 0] = np.divide(pending, one)
        return shares

    def parts(self, stage: int) -> tuple[Mapping[Kind, tuple[ProfileRow, ...]], ...]:
        """Return the rows of each part of a stage."""
        return self.rows[stage * self.listed_chunks : (stage + 1) * self.listed_chunks]

    def clocks_mhz(self, stage: int) -> set[int]:
        """Return all frequencies that something of a stage was profiled at."""
        parts = self.parts(stage)
        return {row.frequency_mhz for part in parts for rows in part.values() for row in rows}

    def row(self, part: int, kind: Kind, frequency_mhz: int) -> ProfileRow:
        """Return the row of a part, kind and frequency; ProfileError if that was not profiled."""
        rows = self.rows[part][kind]
        for row in rows:
            if row.frequency_mhz == frequency_mhz:
                return row
        raise ProfileError(
            f"{self.source}: {row_name(part, kind, self.listed_chunks)} was not profiled at this "
            "frequency (MHz)",
            value=frequency_mhz,
            remedy=f"Profiled there: {', '.join(str(row.frequency_mhz) for row in rows)}.",
        )

    def valley_j(self, stage: int) -> dict[int, float]:
        """Return the energy (J) of one forward plus one backward of all parts of a stage.

        By the clocks that all of these were profiled at, rising.
        """
        units = [part[kind] for kind in WHOLE for part in self.parts(stage)]
        curves = [{row.frequency_mhz: row.energy_j for row in rows} for rows in units]
        common = sorted(set(curves[0]).intersection(*curves))
        return {f: sum(curve[f] for curve in curves) for f in common}

    @cached_property
    def optimal_frequency_mhz(self) -> tuple[int, ...]:
        """For each stage, the frequency at the bottom of its energy valley.

        The one with the least energy of one forward plus one backward of all its parts (Choi et
        al., ATC'23, section 3.2); of equal ones the highest. ProfileError: forwards and backwards
        have none in common.
        """
        optimal = []
        for stage in range(self.num_stages):
            both = [(energy_j, -f) for f, energy_j in self.valley_j(stage).items()]
            if not both:
                raise ProfileError(
                    f"{self.source}: stage {stage} has no frequency that both its forward and its "
                    "backward were profiled at, so it has no energy valley",
                    remedy="Profile both at the same frequencies.",
                )
            optimal.append(-min(both)[1])
        return tuple(optimal)

    def for_chunks(self, num_chunks: int) -> Profile:
        """Return the profile of one of `num_chunks` chunks of each stage.

        A profile without chunks gives each of V chunks 1/V of its stage's time, energy and
        activations; one measured with another number is refused (ProfileError).
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
            {
                kind: tuple(row.scaled(1 / num_chunks) for row in rows)
                for kind, rows in kinds.items()
            }
            for kinds in self.rows
        )
        return replace(self, rows=rows, sidecar=self.sidecar.for_chunks(num_chunks))

    def with_split_backwards(self, assumed: SplitBackward) -> Profile:
        """Return the profile with rows for both parts of a backward, by an assumption.

        ProfileError: it has such rows.
        """
        if Kind.INPUT_GRADIENT in self.kinds:
            raise ProfileError(
                f"{self.source} has rows of split backwards",
                remedy="Leave the assumption of what splitting costs out.",
            )
        rows = tuple(
            in_order({**kinds, **assumed.rows(kinds[Kind.BACKWARD])}) for kinds in self.rows
        )
        return replace(self, rows=rows, assumed=assumed)

    def whole(self) -> Profile:
        """Return the profile without rows of both parts of a backward: its orders split none."""
        rows = tuple(
            {kind: kinds[kind] for kind in kinds if kind not in SPLIT[1:]} for kinds in self.rows
        )
        return replace(self, rows=rows, assumed=None)

    def keys(self, schedule: Schedule) -> NDArray[np.int32]:
        """Return where `curves` has each unit of a schedule, [num_stages, units_per_stage].

        ProfileError: it has units of a kind that the profile has no rows of.
        """
        keys = schedule.unit_keys(self.listed_chunks, self.kinds)
        if keys.min() < 0:
            places = set(schedule.priced_kinds[keys < 0].tolist())
            missing = [kind for at, kind in enumerate(LISTED) if at in places]
            raise ProfileError(
                f"Schedule '{schedule.name}' has units of the kind {' and '.join(missing)}, and "
                f"{self.source} no rows of any",
                remedy="Use a profile that was measured on such an order, or for split backwards "
                "assume what they cost (--split-overhead).",
            )
        return keys

    def lookup(self, schedule: Schedule, frequency_mhz: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return time (s) and energy (J) of each unit, shaped as the frequencies.

        ProfileError: a frequency that was not profiled for that part and kind, or where the
        profile interpolates, one above or below all that were.
        """
        keys = self.keys(schedule)
        time_s = np.empty(frequency_mhz.shape)
        energy_j = np.empty(frequency_mhz.shape)
        for key, (clocks, times_s, energies_j) in enumerate(self.curves):
            part, place = divmod(key, len(self.kinds))
            stage, kind = part // self.listed_chunks, self.kinds[place]
            mask = keys[stage] == key
            if kind is Kind.NOTHING:
                time_s[stage][mask], energy_j[stage][mask] = NOTHING_S, 0.0
                continue
            wanted = frequency_mhz[stage][mask]
            at = np.searchsorted(clocks, wanted, side="right") - 1
            if self.interpolates:
                known = (at >= 0) & (wanted <= clocks[-1])
            else:
                known = clocks[at] == wanted
            if not known.all():
                self.row(part, kind, int(wanted[~known][0]))  # raises, says why
            time_s[stage][mask] = np.interp(wanted, clocks, times_s)
            energy_j[stage][mask] = np.interp(wanted, clocks, energies_j)
        return time_s, energy_j

    @cached_property
    def curves(self) -> tuple[FloatArray, ...]:
        """[part and kind] rows of frequencies (MHz), times (s), energies (J), lowest first."""
        return tuple(
            np.array([(row.frequency_mhz, row.time_s, row.energy_j) for row in reversed(rows)]).T
            for kinds in self.rows
            for rows in kinds.values()
        )

    @property
    def _listed(self) -> list[tuple[int, Kind, ProfileRow]]:
        """All rows but those that follow from others, with the part and kind that each is of."""
        return [
            (part, kind, row)
            for part, kinds in enumerate(self.rows)
            for kind, rows in kinds.items()
            if kind is not Kind.NOTHING
            if self.assumed is None or kind not in SPLIT[1:]
            for row in rows
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the table and the sidecar as one object, for `profile_of_json`."""
        rows = [(part, kind.value, *astuple(row)) for part, kind, row in self._listed]
        sidecar = json.loads(self.sidecar.to_json_text())
        return {"rows": rows, "listed_chunks": self.listed_chunks, "sidecar": sidecar}

    def to_csv(self) -> str:
        """Return the table as CSV text."""
        return rows_text(self._listed, self.listed_chunks)

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


def at_any_clock(curve: FloatArray, frequency_mhz: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Return times (s) and energies (J) at clocks that need not be profiled.

    They are linear in the clock between those that were, constant above, and below grow as a unit's
    whose time all follows the clock: it takes no more. `curve` is one of `Profile.curves`.
    """
    clocks, *known = curve
    asked = np.asarray(frequency_mhz, dtype=np.float64)
    more = np.maximum(1.0, clocks[0] / asked)
    time_s, energy_j = (more * np.interp(asked, clocks, values) for values in known)
    return time_s, energy_j


def make_profile(
    rows: Iterable[tuple[int, Kind, ProfileRow]],
    *,
    source: str,
    sidecar: Sidecar | None = None,
    listed_chunks: int = 1,
) -> Profile:
    """Make a checked profile of rows in any order, each with its part (see `Profile`).

    A part that has the two halves of a backward, and no whole one, gets one after the other.
    ProfileError if a part lacks a kind, or the sidecar says another number of chunks.
    """
    table: dict[int, dict[Kind, list[ProfileRow]]] = {}
    for part, kind, row in rows:
        known = table.setdefault(part, {}).setdefault(kind, [])
        if any(other.frequency_mhz == row.frequency_mhz for other in known):
            raise ProfileError(
                f"{source} has two rows for {row_name(part, kind, listed_chunks)} at this "
                "frequency (MHz)",
                value=row.frequency_mhz,
                remedy="Keep one.",
            )
        known.append(row)
    if not table or min(table) < 0:
        raise ProfileError(
            f"{source} has no rows, or a stage below 0",
            remedy="A profile lists every stage and instruction.",
        )
    for of_part in table.values():
        if of_part.keys() & set(SPLIT) == set(SPLIT):
            of_part.setdefault(Kind.BACKWARD, whole_backwards(of_part))
    num_stages = max(table) // listed_chunks + 1
    needed = {*WHOLE, *chain.from_iterable(table.values())}
    if needed & set(SPLIT[1:]):
        needed |= set(SPLIT[1:])
    parts: list[Mapping[Kind, tuple[ProfileRow, ...]]] = []
    for part in range(num_stages * listed_chunks):
        for kind in Kind:
            if kind in needed and not table.get(part, {}).get(kind):
                raise ProfileError(
                    f"{source} has no row for {row_name(part, kind, listed_chunks)}",
                    remedy=f"Profile it on each of the stages 0 to {num_stages - 1}.",
                )
        parts.append(
            in_order(
                {
                    kind: tuple(sorted(known, key=lambda r: r.frequency_mhz, reverse=True))
                    for kind, known in table[part].items()
                }
            )
        )
    sidecar = sidecar or Sidecar(num_chunks=listed_chunks)
    profile = Profile(tuple(parts), "", source, sidecar, listed_chunks=listed_chunks)
    return replace(profile, sha256=hashlib.sha256(profile.to_csv().encode()).hexdigest())


def profile_of_json(data: Mapping[str, Any], path: Path) -> Profile:
    """Read what `Profile.to_json` made; `path` is where it was found, for messages."""
    return make_profile(
        [(part, Kind(kind), ProfileRow(*numbers)) for part, kind, *numbers in data["rows"]],
        source=str(path),
        sidecar=sidecar_of_fields(Fields(data["sidecar"], path)),
        listed_chunks=data["listed_chunks"],
    )


def read_profile(path: Path) -> Profile:
    """Read a profile CSV, and its sidecar if there is one.

    EnvPipeError names file, line and value of what is wrong.
    """
    content, rows, listed_chunks = read_rows(path)
    profile = make_profile(rows, source=str(path), listed_chunks=listed_chunks)
    _check_energies(profile)
    beside = sidecar_path(path)
    sidecar = read_sidecar(beside, profile.num_stages) if beside.exists() else Sidecar()
    if sidecar.num_chunks == 1:
        sidecar = replace(sidecar, num_chunks=listed_chunks)
    return replace(profile, sidecar=sidecar, sha256=hashlib.sha256(content).hexdigest())


def _check_energies(profile: Profile) -> None:
    """Refuse a part whose baseline, all at the highest clocks, would take no energy."""
    for part, kinds in enumerate(profile.rows):
        if not any(kinds[kind][0].energy_j for kind in WHOLE):
            where = row_name(part, Kind.BACKWARD, profile.listed_chunks)
            raise ProfileError(
                f"{profile.source}: {where.rsplit(' ', 1)[0]} has no energy at its highest clocks",
                remedy="Energy is what a plan saves: give J of one GPU and one microbatch.",
            )
