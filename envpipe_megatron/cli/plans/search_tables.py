"""Tables that `envpipe search` prints: the best configurations, and where their time goes.

Enter at `Shown`; the command in `search.py` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from rich.table import Table

from envpipe_megatron.console import table_of
from envpipe_megatron.search.candidates import Losses
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
        candidate, peak_bytes = best.candidate, best.peak_bytes
        layouts, works = candidate.configuration.stages, candidate.works
        recomputed = recomputed_layers(candidate.configuration)
        rows = [
            (
                str(stage),
                " + ".join(pieces_words(self.profile.pieces[a:b]) for a, b in layout.chunks),
                f"TP{layout.sizes.tensor_parallel} DP{layout.data_parallel}",
                "-" if name is None else f"{name} {count}",
                f"{1e3 * work.time_s:.2f}",
                f"{peak / _GIB:.2f}",
            )
            for stage, (layout, work, peak, (name, count)) in enumerate(
                zip(layouts, works, peak_bytes, recomputed, strict=True)
            )
        ]
        columns = ("stage", "layers", "sizes", "recomputed", "time (ms)", "peak (GiB)")
        shown = table_of("Stages of the best, at the highest clocks", columns, rows)
        shown.columns[1].justify = "left"
        return shown

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


def pieces_words(names: tuple[str, ...]) -> str:
    """Pieces in the order they run, those of a name in a row counted."""
    runs = ((name, len(list(same))) for name, same in groupby(names))
    return ", ".join(name if count == 1 else f"{count} {name}s" for name, count in runs)


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
