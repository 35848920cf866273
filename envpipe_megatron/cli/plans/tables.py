"""Tables of the commands on plans: plans side by side, and what a search found.

Enter at `show_plans`, or with a row for each plan at `show_figures`; at `show_found` for `envpipe
search`, and at `show_stages`, by which `envpipe partition` prints its split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from envpipe_megatron.cli.common import numbers
from envpipe_megatron.console import say, show_table
from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import NORMAL_95, Cost, Plan, saving_uncertainty_percent
from envpipe_megatron.search.candidates import Candidate
from envpipe_megatron.search.layer_profile import EMBEDDING, LOSS, LayerProfile
from envpipe_megatron.search.search import Found, Ranked

_GIB = 2.0**30


#: Figures of a plan: their names in JSON and in tables, and how a cell shows them.
_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("schedule", "order", str),
    ("policy", "clocks", str),
    ("iteration_time_s", "iteration time (s)", "{:.4f}".format),
    ("energy_j", "energy (J)", "{:.1f}".format),
    ("mean_power_w", "mean power (W)", "{:.1f}".format),
    ("saving_percent", "saving (%)", "{:.2f}".format),
    ("saving_uncertainty_percent", "saving, 95 % (+-)", lambda of: f"{NORMAL_95 * of:.2f}"),
    ("gap_percent", "gap to the lower bound (%)", "{:.3f}".format),
    ("slowdown_percent", "slowdown (%)", "{:.3f}".format),
    ("num_chunks", "chunks of a stage", str),
    ("extra_forwards", "extra forwards by stage", numbers),
    ("microbatches_in_flight", "peak in flight by stage", numbers),
    ("activations_gib", "activations (GiB) by stage", lambda of: numbers(np.round(of, 2))),
    ("clock_changes", "changes of clock by stage", numbers),
)


def facts_of(plan: Plan, baseline: Cost) -> dict[str, Any]:
    """Return figures of a plan beside a baseline's cost, as the commands' JSON has them."""
    held = plan.profile.sidecar.activation_bytes
    if held is not None:
        held = (plan.schedule.peak_held(plan.profile.weight_shares) * held / _GIB).tolist()
    return {
        "schedule": plan.schedule.name,
        "policy": plan.policy,
        **vars(plan.cost),
        "saving_percent": plan.cost.saving_percent(baseline),
        "saving_uncertainty_percent": saving_uncertainty_percent(plan),
        "slowdown_percent": plan.cost.slowdown_percent(baseline),
        "gap_percent": plan.gap_percent,
        "mean_power_w": plan.cost.mean_power_w,
        "num_chunks": plan.schedule.num_chunks,
        "extra_forwards": list(plan.schedule.extra_forwards),
        "peak_in_flight": list(plan.schedule.peak_in_flight),
        "microbatches_in_flight": list(plan.schedule.microbatches_in_flight),
        "activations_gib": held,
        "clock_changes": plan.evaluation.clock_changes.tolist(),
    }


def show_figures(title: str, plans: Sequence[Plan], names: Collection[str]) -> None:
    """Print figures of plans beside their own baselines, a row each."""
    figures = [figure for figure in _FIGURES if figure[0] in names]
    facts = [facts_of(plan, plan.baseline.cost) for plan in plans]
    rows = ([_cell(each[name], write) for name, _, write in figures] for each in facts)
    show_table(title, [shown for _, shown, _ in figures], rows)


def show_plans(title: str, columns: Mapping[str, dict[str, Any]]) -> None:
    """Print the `facts_of` plans, a column each, except for what none of them has."""
    rows = [
        (shown, *(_cell(each[name], write) for each in columns.values()))
        for name, shown, write in _FIGURES
    ]
    show_table(title, ("", *columns), (row for row in rows if any(row[1:])))


def _cell(value: Any, write: Callable[[Any], str]) -> str:
    return "" if value is None else write(value)


def show_summary(plan: Plan) -> None:
    """Print a plan beside its baseline."""
    baseline = plan.baseline
    named = {"plan": plan, f"baseline ({baseline.schedule.name})": baseline}
    facts = {name: facts_of(each, baseline.cost) for name, each in named.items()}
    show_plans(f"{plan.policy} on {plan.schedule.name}", facts)


def show_found(profile: LayerProfile, found: Found) -> None:
    """Print the best configurations, where their time goes, and the stages of the best."""
    ranked, best = found.ranked, found.ranked[0]
    candidates = [each.candidate for each in ranked]
    shares = [each.time_shares for each in candidates]
    numbers = [str(number) for number in range(1, len(ranked) + 1)]
    _show_columns(
        "The best configurations",
        {
            "": numbers,
            " ": [sizes_words(each) for each in ranked],
            "recomputed": [recomputation_words(each) for each in ranked],
            "time (s)": [f"{each.iteration_time_s:.4f}" for each in ranked],
            "energy (J)": [f"{each.cost.energy_j:.0f}" if each.cost else "" for each in ranked],
            "peak (GiB)": [f"{each.peak_bytes.max() / _GIB:.1f}" for each in ranked],
        },
        left=(" ", "recomputed"),
    )
    longer = [each.iteration_time_s / best.candidate.iteration_time_s for each in candidates]
    _show_columns(
        "Where the time goes in the framework's own order, %, and against the best",
        {
            "": numbers,
            **{part: [f"{100 * each[part]:.1f}" for each in shares] for part in shares[0]},
            "time": [f"{100 * (times - 1):+.1f}" for times in longer],
            "of it, most by": [
                _why_slower(each, shares[0], times)
                for each, times in zip(shares, longer, strict=True)
            ],
        },
    )
    show_stages("Stages of the best, at the highest clocks", best.candidate, best.peak_bytes)
    if bound := _host_bound(profile, best.candidate):
        say(
            f"\nNote: {', '.join(bound)}: the host needs about as long to start this work as the "
            "GPU to do it. Times in training may be longer than predicted, and scatter. Larger "
            "microbatches help, and CUDA graphs.\n"
        )
    cut = f"{found.num_cut} of {found.num_shapes} shapes were cut"
    say(f"{cut}: the others have a bound above what was found.")


def _host_bound(profile: LayerProfile, candidate: Candidate) -> list[str]:
    """Return the layers of a configuration that the host bounds."""
    stages = candidate.configuration.stages
    there = {(stage.sizes, profile.pieces[at]) for stage in stages for at in stage.pieces}
    return sorted(
        {
            piece
            for sizes, piece in there
            if piece not in (EMBEDDING, LOSS) and profile.at(sizes)[piece].is_host_bound
        }
    )


def _show_columns(title: str, columns: Mapping[str, list[str]], left: Collection[str] = ()) -> None:
    """Print a table except for columns that have nothing to say."""
    known = {name: cells for name, cells in columns.items() if any(cells)}
    show_table(title, known, zip(*known.values(), strict=True), left=left)


def sizes_words(each: Ranked) -> str:
    """Describe a configuration in a few words: parallel sizes, microbatches x samples."""
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
    """Name what is recomputed, and of how many layers on each stage."""
    by_stage = [stage.recomputed for stage in each.candidate.configuration.stages]
    names = list(dict.fromkeys(name for name, _ in by_stage if name is not None))
    counts = " ".join(str(count) for _, count in by_stage[:8])
    return f"{'/'.join(names)} {counts}{' ...' if len(by_stage) > 8 else ''}" if names else "-"


def show_stages(
    title: str, candidate: Candidate, peak_bytes: FloatArray, peak: str = "peak (GiB)"
) -> None:
    """Print the stages of a configuration."""
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
            f"{name} {count}" if name else ""
            for name, count in (stage.recomputed for stage in stages)
        ],
        "forward (ms)": [f"{1e3 * work.forward_s[:, 0].sum():.3f}" for work in works],
        "backward (ms)": [f"{1e3 * work.backward_s[:, 0].sum():.3f}" for work in works],
        "share of bottleneck (%)": [f"{100 * work.time_s / longest_s:.1f}" for work in works],
        peak: [f"{held / _GIB:.2f}" if peak_bytes.any() else "" for held in peak_bytes],
    }
    _show_columns(title, columns, left=("layers",))


def pieces_words(names: tuple[str, ...]) -> str:
    """Name pieces in the order they run: like ones in a row counted, numbers as a range."""
    words = []
    for name, same in groupby(names, lambda name: "" if name.isdigit() else name):
        run = list(same)
        if not name:
            words.append("-".join(dict.fromkeys([run[0], run[-1]])))
        else:
            words.append(name if len(run) == 1 else f"{len(run)} {name}s")
    return ", ".join(words)


def _why_slower(shares: dict[str, float], best: dict[str, float], longer: float) -> str:
    """Name the largest part of the time that a candidate takes more than the best."""
    more = {name: 100 * (share * longer - best[name]) for name, share in shares.items()}
    name = max(more, key=lambda each: more[each])
    return f"{name} {more[name]:+.1f}" if more[name] >= 0.05 else "-"
