"""Tables that `envpipe search` prints: the best configurations, and where their time goes.

Enter at `Shown`; the command in `search.py` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from rich.table import Table

from envpipe_megatron.console import table_of
from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.search.candidates import Candidate, Losses
from envpipe_megatron.search.configuration import recomputed_layers
from envpipe_megatron.search.layer_profile import EMBEDDING, LOSS, LayerProfile
from envpipe_megatron.search.search import Found, Ranked

_GIB = 2.0**30


@dataclass(frozen=True)
class Shown:
    """Tables and sentences about a search."""

    profile: LayerProfile
    found: Found

    def table(self) -> Table:
        """The best configurations."""
        rows = []
        for number, each in enumerate(self.found.ranked, start=1):
            cells = [
                str(number),
                sizes_words(each),
                recomputation_words(each),
                f"{each.iteration_time_s:.4f}",
                f"{each.peak_bytes.max() / _GIB:.1f}",
            ]
            if each.cost is not None:
                cells[4:4] = [f"{each.cost.energy_j:.0f}"]
            rows.append(cells)
        energy = ["energy (J)"] if self.profile.has_energy else []
        columns = ["", "", "recomputed", "time (s)", *energy, "peak (GiB)"]
        shown = table_of("The best configurations", columns, rows)
        shown.columns[2].justify = "left"
        return shown

    def lost(self) -> Table:
        """Where the time of each goes, and what it takes more than the best."""
        best, rows = self.found.ranked[0].candidate, []
        for number, each in enumerate(self.found.ranked, start=1):
            candidate, losses = each.candidate, each.candidate.losses
            longer = candidate.iteration_time_s / best.iteration_time_s
            rows.append(
                (
                    str(number),
                    *(
                        f"{100 * share:.1f}"
                        for share in (
                            losses.computed,
                            losses.recomputed,
                            losses.bubbles,
                            losses.reduction,
                        )
                    ),
                    f"{100 * (longer - 1):+.1f}",
                    why_slower(losses, best.losses, longer),
                )
            )
        columns = ("", "computing", "again", "bubbles", "reduction", "time", "of it, most by")
        return table_of(
            "Where the time goes in the framework's own order, %, and against the best",
            columns,
            rows,
        )

    def stages(self) -> Table:
        """The stages of the best."""
        best = self.found.ranked[0]
        title = "Stages of the best, at the highest clocks"
        return stage_table(title, best.candidate, best.peak_bytes)

    def host_bound(self) -> list[str]:
        """The best one's layers that the host bounds."""
        stages = self.found.ranked[0].candidate.configuration.stages
        there = {(stage.sizes, self.profile.pieces[at]) for stage in stages for at in stage.pieces}
        return sorted(
            {
                piece
                for sizes, piece in there
                if piece not in (EMBEDDING, LOSS) and self.profile.at(sizes)[piece].is_host_bound
            }
        )

    def how_sure(self) -> str:
        """Say how much was looked at."""
        cut = f"{self.found.num_cut} of {self.found.num_shapes} shapes were cut"
        return f"{cut}: the others have a bound above what was found."


def sizes_words(each: Ranked) -> str:
    """A configuration in a few words: parallel sizes, microbatches x samples."""
    configuration = each.candidate.configuration
    first = configuration.stages[0]
    parts = [
        ("TP", first.sizes.tensor_parallel),
        ("CP", first.sizes.context_parallel),
        ("EP", first.sizes.expert_parallel),
        ("PP", len(configuration.stages)),
        ("VP", configuration.num_chunks),
        ("DP", first.data_parallel),
    ]
    text = " ".join(f"{name}{size}" for name, size in parts if size > 1) or "one GPU"
    return f"{text}, {configuration.num_microbatches} x {first.sizes.microbatch_size}"


def recomputation_words(each: Ranked) -> str:
    """The names of what is recomputed, and of how many layers on each stage."""
    by_stage = recomputed_layers(each.candidate.configuration)
    names = list(dict.fromkeys(name for name, _ in by_stage if name is not None))
    counts = " ".join(str(count) for _, count in by_stage[:8])
    return f"{'/'.join(names)} {counts}{' ...' if len(by_stage) > 8 else ''}" if names else "-"


def stage_table(
    title: str, candidate: Candidate, peak_bytes: FloatArray, peak: str = "peak (GiB)"
) -> Table:
    """Stages of a configuration; columns that have nothing to say are left out."""
    configuration, works = candidate.configuration, candidate.works
    stages, pieces = configuration.stages, candidate.profile.pieces
    longest_s = max(work.time_s for work in works)
    columns = {
        "stage": [str(stage) for stage in range(len(stages))],
        "layers": [
            " + ".join(pieces_words(pieces[first:end]) for first, end in stage.chunks)
            for stage in stages
        ],
        "sizes": [
            f"TP{stage.sizes.tensor_parallel} DP{stage.data_parallel}" if stage.num_gpus > 1 else ""
            for stage in stages
        ],
        "recomputed": [
            f"{name} {count}" if name else "" for name, count in recomputed_layers(configuration)
        ],
        "forward (ms)": [f"{1e3 * work.forward_s[:, 0].sum():.3f}" for work in works],
        "backward (ms)": [f"{1e3 * work.backward_s[:, 0].sum():.3f}" for work in works],
        "share of bottleneck (%)": [f"{100 * work.time_s / longest_s:.1f}" for work in works],
        peak: [f"{held / _GIB:.2f}" if peak_bytes.any() else "" for held in peak_bytes],
    }
    known = {name: cells for name, cells in columns.items() if any(cells)}
    shown = table_of(title, known, zip(*known.values(), strict=True))
    shown.columns[1].justify = "left"
    return shown


def pieces_words(names: tuple[str, ...]) -> str:
    """Pieces in the order they run: those of a name in a row counted, numbers as a range."""
    words = []
    for name, same in groupby(names, lambda name: "" if name.isdigit() else name):
        run = list(same)
        if not name:
            words.append("-".join(dict.fromkeys([run[0], run[-1]])))
        else:
            words.append(name if len(run) == 1 else f"{len(run)} {name}s")
    return ", ".join(words)


def why_slower(losses: Losses, best: Losses, longer: float) -> str:
    """Name the largest part of the time that a candidate takes more than the best."""
    more = {
        name: 100 * (getattr(losses, field) * longer - getattr(best, field))
        for name, field in (
            ("computing", "computed"),
            ("recomputing", "recomputed"),
            ("bubbles", "bubbles"),
            ("reduction", "reduction"),
        )
    }
    name = max(more, key=lambda each: more[each])
    return f"{name} {more[name]:+.1f}" if more[name] >= 0.05 else "-"
