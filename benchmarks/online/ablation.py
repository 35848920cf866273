"""What the closed loop loses without each of its heuristics, one at a time.

    python -m benchmarks.online.ablation --workers 16    # some two hours of one core
    python -m benchmarks.online.ablation --variant parking --variant "late clocks" --job slow

Jobs run on emulated GPUs, 12 microbatches on four stages. Compared with the loop as it is are the
energy after the begin, the slowest iteration after the profile, but not within ten of a fault's
begin or end, and the time lost in all.
"""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np

from benchmarks.online.runs import FAULTS, restarts, run_job, scripted
from benchmarks.outputs import leave, make_console, make_table, output_option
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.tuning import controller, judge, parking, replicas
from envpipe_megatron.tuning.commands import Window
from envpipe_megatron.tuning.controller import Controller
from envpipe_megatron.tuning.judge import Judge
from envpipe_megatron.tuning.measured import fit, lateness, powers, store
from envpipe_megatron.tuning.measured.fit import Point, Times
from envpipe_megatron.tuning.measured.lateness import Lateness
from envpipe_megatron.tuning.measured.store import Store
from envpipe_megatron.tuning.planner import Planner
from envpipe_megatron.tuning.probes import slack
from envpipe_megatron.tuning.replicas import ReplicaLevels

_NEVER, _AS_IS = 10**9, "as it is"
#: A module, a constant of it, and its value; or a function, text of it, and what is there instead.
VARIANTS: dict[str, tuple[Any, str, Any]] = {
    _AS_IS: (controller, "BASELINE_EVERY", controller.BASELINE_EVERY),
    "probe: all clocks": (slack, "_BELOW_VALLEY", _NEVER),
    "probe: no clock below the valley": (slack, "_BELOW_VALLEY", 0),
    "probe: as few units as there can be": (slack, "_ENOUGH_S", 0.01),
    "probe: no slack is used": (slack._within_slack, "(slack_s + allowed_s >=", "(-np.inf >"),
    "probe: only in slack": (slack.slack_probe, "=at_cost and", "=False and"),
    "probe: again at cost too": (Controller._look_again, "at_cost=False", "at_cost=True"),
    "looks: only after a drift": (controller, "_LOOKS_AT_TOP", _NEVER),
    "looks: always as often": (controller, "_SELDOM", 2),
    "looks: no unit is lifted": (slack.lifted, "if there.size:", "if False:"),
    "upset: never": (judge, "_UPSETS", _NEVER),
    "upset: not looked at again": (Controller._look_again, "self._store.forget", "return "),
    "window: 8 iterations": (Controller._run_plan, "WINDOW, settle", "8, settle"),
    "baseline: never again": (controller, "BASELINE_EVERY", _NEVER),
    "baseline: one iteration": (controller, "BASELINE_ITERATIONS", 1),
    "corrections: none": (controller, "_MOST_CORRECTIONS", 0),
    "corrections: one": (controller, "_MOST_CORRECTIONS", 1),
    "corrections: no other price": (Controller._correct, "if not better:", "if False:"),
    "plans: only the faster one is tried": (Planner.begin, "faster, factor]", "faster]"),
    "parking: none": (parking.parked, "if not change_s:", "if True:"),
    "harm: never seen": (Judge.harmed, "return True", "return False"),
    "harm: noise is not allowed for": (Judge.harmed, "noise = 2 *", "noise = 0 *"),
    "steps: a baseline is not predicted": (Controller._own_predicted_s, "self._usual_own_s()", "1"),
    "meters: all is kept after a change": (store, "_KEEPS", 1.0),
    "meters: 8 nodes of the clock": (powers, "_NUM_NODES", 8),
    "meters: nodes from a tenth of the clock on": (powers, "_LOWEST_NODE", 0.1),
    "powers: no alikeness": (powers, "_ALIKENESS", (0.0,)),
    "powers: only the greatest alikeness": (powers, "_ALIKENESS", (0.1,)),
    "powers: one knee": (powers, "_KNEES", np.array([0.7])),
    "powers: no clock is limited": (Store._fitted_w, "times.limit_mhz", "self.clocks_mhz[-1]"),
    "profile: units take what is most likely": (Store.profile, "+ times.errs[used]", ""),
    "profile: upset stages keep all clocks": (store, "_NO_SLOWER", 0.0),
    "pipelines: times have no error": (Window.own_error, "return", "return 0 *"),
    "tails: not learnt": (Store._learn_tails, "if followed.any():", "if False:"),
    "late clocks: not learnt": (Lateness.learn, "if not own_s.size:", "if True:"),
    "late clocks: 0 until seen": (lateness, "_LATE_S", 0.0),
    "late clocks: all tell of their own": (Lateness.at_their_clock, "arrives_s <=", "-np.inf <"),
    "late clocks: also from models": (Store._learn_lateness, "at] = fr", "at] = True or fr"),
    "times: no clock is limited": (fit, "_LIMITS", np.ones(1)),
    "times: the best limit, however little better": (fit, "_CLEARLY_BETTER", 0.0),
    "times: nothing is a change": (fit, "_SURELY", _NEVER),
    "times: two errors are a change": (fit, "_SURELY", 2.0),
    "times: all clocks change alike": (Times._take_in, "common) >", "common) > np.inf +"),
    "times: each clock changes by itself": (Times._take_in, "common) >", "common) > -np.inf +"),
    "times: points are trusted in full": (Times.fit, "(_ALIKE, errors)", "(_ALIKE, 0 * errors)"),
    "times: the model only": (fit.fit_times_s, "missed = trust**2", "missed = 0 * trust"),
    "times: no averages": (Point.averaged, "Point(time_s, min(units, _MOST_UNITS))", "other"),
    "times: models do not err": (Times.fit, "self.errs = errs +", "self.errs ="),
    "times: models err as much between as beyond": (fit, "_ERRS_BETWEEN", 0.02),
    "times: scatter is no error": (Times.fit, "errs + np.interp(", "errs + 0 * np.interp("),
    "times: unseen points stay": (Times._move, "for clock in unseen:", "for clock in ():"),
    "times: no point is forgotten": (Times._move, "alike or", "True or"),
    "times: beyond what was seen, all has changed": (Times._move, "near.append(1.0)", "pass"),
    "replicas: none follows": (ReplicaLevels.follow, "room < 1 + self._differ", "room > 0"),
    "replicas: noise tells them apart": (replicas, "_SURELY", 0.0),
    "replicas: the slowest is as others": (
        ReplicaLevels.compare,
        "factor.max()",
        "factor[self.usual]",
    ),
    "replicas: one is measured": (
        Controller._learn_usual,
        "replicas, _FADES",
        "replicas[:1], _FADES",
    ),
}

_CONFIG = JobOptions(num_microbatches=12, baseline_steps=3)
#: Iterations of a job; those between which faults last, and after which it is steady.
_ITERATIONS, _FAULT, _OVER, _FOUND_OUT, _STEADY = 150, 50, 105, 10, 44
MEASURES = ("energy (points)", "slowest (%)", "lost (iterations)")


def _with(fault: str, **more: Any) -> dict[str, Any]:
    """What `run_job` is given for one of `FAULTS`."""
    more |= {"replicas": 4 if fault == "replica" else 1}
    faults = scripted(fault, _FAULT, _OVER, 4, more["replicas"])
    return {"faults": faults, "starts_again": restarts(fault, _FAULT, _OVER), **more}


_A100, _A40 = load_preset("a100-sxm"), load_preset("a40")
_EVEN, _SHORT, _UNEVEN, _LONG = [0.03] * 4, [0.008] * 4, [0.03] * 3 + [0.0375], [0.03] * 3 + [0.12]
_FOLLOWS, _SCATTER = {"emulated": {"wait_follows": 0.6}}, {"scatter": 0.015, "seed": 1}
JOBS: dict[str, tuple[Any, list[float], dict[str, Any]]] = {
    "A100, even": (_A100, _EVEN, {}),
    "A100, uneven": (_A100, _UNEVEN, {}),
    "A40, even": (_A40, _EVEN, {}),
    "A40, uneven": (_A40, _UNEVEN, {}),
    "waits follow the clock": (_A100, _LONG, _FOLLOWS),
    "short units": (_A100, _SHORT, {}),
    "slow clocks": (replace(_A100, frequency_change_s=0.03), _EVEN, {}),
    "slow counters": (replace(_A100, refresh_s=1.0), _EVEN, {}),
    "late plans": (_A100, _EVEN, {"late": (12,)}),
    "hiccups, 4 replicas": (_A100, _EVEN, {"replicas": 4, "emulated": {"hiccups": 0.05}}),
    "tail and hiccups": (_A100, _EVEN, {"emulated": {"tail_s": 0.25, "hiccups": 0.02, **_SCATTER}}),
    **{kind: (_A100, _EVEN, _with(kind)) for kind in FAULTS},
    "slow, late plans": (_A100, _EVEN, _with("slow", late=(8,))),
    "stuck, for long": (_A100, _EVEN, _with("stuck", iterations=750)),
    "capped, waits follow": (_A100, _LONG, _with("capped", **_FOLLOWS)),
    "stuck, scatter": (_A100, _EVEN, _with("stuck", emulated=_SCATTER)),
    "slow, scatter": (_A100, _EVEN, _with("slow", emulated=_SCATTER)),
}


@contextmanager
def without(variant: str) -> Iterator[None]:
    """Have this process' loops lack what one of `VARIANTS` says, meanwhile."""
    owner, name, value = VARIANTS[variant]
    if not isinstance(owner, ModuleType):
        name, value = "__code__", _edited(owner, name, value)
    usual = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, usual)


def _edited(function: Any, old: str, new: str) -> Any:
    """The code of a function whose source has other text in one place."""
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise ValueError(f"{function.__qualname__} has no single {old!r}: correct the variant")
    made: dict[str, Any] = {}
    source = "from __future__ import annotations\n" + source.replace(old, new)
    exec(source, function.__globals__, made)
    return made[function.__name__].__code__


def measure(variant: str, job: str) -> dict[str, Any]:
    """Run one of `JOBS` as one of `VARIANTS`; a row."""
    preset, forward_s, what = JOBS[job]
    with without(variant):
        ran = run_job(_CONFIG, preset, forward_s, **{"iterations": _ITERATIONS, **what})
    profiled = max(at for at in range(_FAULT - 1) if ran.job[at].phase == Phase.PROFILE)
    end = len(ran.job)
    spans = ((profiled + 1, _FAULT), (_FAULT + _FOUND_OUT, _OVER), (_OVER + _FOUND_OUT, end))
    slowest = max(ran.slower(*span) for span in spans)
    values = -100 * ran.saved(_STEADY, end), 100 * slowest, ran.lost(0, end)
    return {"variant": variant, "job": job, **dict(zip(MEASURES, values, strict=True))}


@click.command()
@click.option("--variant", "variants", multiple=True, help="Text of the names of some. [all]")
@click.option("--job", "jobs", multiple=True, help="Text of the names of some. [all]")
@click.option("--workers", default=os.cpu_count(), show_default=True, help="Processes.")
@output_option("online_ablation")
def main(variants: tuple[str, ...], jobs: tuple[str, ...], workers: int, output: Path) -> None:
    """Run variants in jobs, and print by how much each measure rises in the worst of these."""
    wanted = [v for v in VARIANTS if v == _AS_IS or any(text in v for text in variants or ("",))]
    run_in = [job for job in JOBS if any(text in job for text in jobs or ("",))]
    pairs = [(variant, job) for job in run_in for variant in wanted]
    with ProcessPoolExecutor(workers) as pool:
        rows = list(pool.map(measure, *zip(*pairs, strict=True)))
    leave(output, {"ablation": rows})
    found = {(row["variant"], row["job"]): row for row in rows}
    table: list[dict[str, Any]] = []
    for variant in wanted:
        table.append({"without": variant})
        for name in MEASURES:
            rises = {job: found[variant, job][name] - found[_AS_IS, job][name] for job in run_in}
            worst = max(rises, key=rises.__getitem__)
            table[-1] |= {name: rises[worst], f"in ({name})": worst}
    make_console().print(make_table("More than as it is, in the worst job", table))


if __name__ == "__main__":
    main()
