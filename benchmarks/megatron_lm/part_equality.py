"""Losses and gradient norms of the patched checkout against those of the unmodified one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.megatron_lm.proof_arms import AGAIN, ARMS, ENVPIPE, OFF, ONE_F_ONE_B, STOCK, Planned
from benchmarks.megatron_lm.proof_jobs import Job, Site, joined, results_alone
from benchmarks.megatron_lm.proof_models import (
    MAPPINGS,
    NO_EVALUATION,
    PP2,
    PP2DP2,
    PP2TP2,
    PP4,
    TINY,
    TINY_ON_CPU,
    Mapping,
    base_arguments,
    corpus_data,
    training,
)
from benchmarks.megatron_lm.proof_state import State

PART = "equality"
#: Of the framework's order before the plan's, beyond those that the framework makes itself.
_WARMUP = 3
_BF16 = "--bf16"
_FP16 = (
    "--fp16 --initial-loss-scale 16777216 --min-loss-scale 1 --loss-scale-window 20 --hysteresis 1"
)


@dataclass(frozen=True)
class Setting:
    """One job that all arms train.

    Args:
        name: of it.
        mapping: how it is spread.
        features: Megatron's flags that make it another than the plain GPT in bf16.
        arms: that train it.
        checkpoints: the format in which it saves, ends, and loads half-way; None if it does not.
        corpus: a real text in place of mock data.
    """

    name: str
    mapping: Mapping
    features: tuple[str, ...] = (_BF16,)
    arms: tuple[str, ...] = (STOCK, ONE_F_ONE_B, ENVPIPE)
    checkpoints: str | None = None
    corpus: bool = False


def settings(num_gpus: int, llama: str) -> list[Setting]:
    """All settings that fit, the most important first."""
    made = []
    for mapping in MAPPINGS:
        gpt = f"gpt-{mapping.name}"
        made.append(Setting(gpt, mapping, arms=ARMS))
        flags = (_BF16, mapping.distributed_optimizer())
        made.append(Setting(f"{gpt}-distopt", mapping, flags))
    untied = "--untie-embeddings-and-output-weights"
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    overlapped = PP2DP2.distributed_optimizer()
    made += [
        Setting("llama-pp4", PP4, (_BF16, llama)),
        Setting("llama-pp2tp2-sequence", PP2TP2, (_BF16, llama, "--sequence-parallel")),
        Setting("gpt-pp2tp2-sequence", PP2TP2, (_BF16, "--sequence-parallel")),
        Setting("fp16-pp4", PP4, (_FP16,)),
        Setting("fp16-pp2dp2-distopt", PP2DP2, (_FP16, overlapped)),
        Setting("recompute-pp4", PP4, (_BF16, recompute)),
        Setting("untied-pp2dp2-distopt", PP2DP2, (_BF16, untied, overlapped)),
        Setting("overlap-pp2dp2", PP2DP2, (_BF16, "--overlap-grad-reduce")),
        Setting("corpus-pp4", PP4, (_BF16,), corpus=True),
        Setting("restart-pp4", PP4, (_BF16,), checkpoints="torch"),
        Setting("fp32-pp2", PP2, ()),
        Setting("restart-pp2dp2-distopt", PP2DP2, (_BF16, overlapped), checkpoints="torch_dist"),
    ]
    return [setting for setting in made if setting.mapping.num_ranks <= num_gpus]


def jobs(site: Site, iterations: int) -> list[Job]:
    """All jobs of all settings; a repeated stock run is made by `repeats`."""
    size = TINY_ON_CPU if site.cpu else TINY
    made = [
        job
        for setting in settings(site.num_gpus, size.llama)
        if site.corpus or not setting.corpus
        for arm in setting.arms
        for job in _jobs_of(setting, arm, site, iterations)
    ]
    return sorted(made, key=lambda job: job.name.endswith(f"/{OFF}"))


def plans(site: Site) -> list[Planned]:
    """The orders that the jobs run."""
    size = TINY_ON_CPU if site.cpu else TINY
    mappings = {setting.mapping for setting in settings(site.num_gpus, size.llama)}
    return [
        Planned(mapping, size.microbatches, arm)
        for mapping in mappings
        for arm in (ONE_F_ONE_B, ENVPIPE)
    ]


def _jobs_of(setting: Setting, arm: str, site: Site, iterations: int) -> list[Job]:
    size = TINY_ON_CPU if site.cpu else TINY
    parts = [
        size.arguments(setting.mapping),
        setting.mapping.arguments,
        *setting.features,
        corpus_data() if setting.corpus else size.mock_data,
        training(iterations),
    ]
    if arm in (ONE_F_ONE_B, ENVPIPE):
        parts.append(Planned(setting.mapping, size.microbatches, arm).arguments(_WARMUP))
    job = Job(
        name=f"{PART}/{setting.name}/{arm}",
        arguments=(*base_arguments(site.cpu), *joined([*parts])),
        num_ranks=setting.mapping.num_ranks,
        iterations=iterations,
        patched=arm in (OFF, ONE_F_ONE_B, ENVPIPE),
        environment=setting.mapping.environment,
        mark_norms="--sequence-parallel" in setting.features,
    )
    if setting.checkpoints is None:
        return [replace(job, arguments=(*job.arguments, *joined([NO_EVALUATION])))]
    half = iterations // 2
    # 0.16.1 ends in a checkpoint where --log-energy is off.
    energy = "" if site.cpu else "--log-energy"
    evaluating = f"--eval-interval {max(1, half // 2)} --eval-iters 2 {energy}"
    saving = f"--ckpt-format {setting.checkpoints} --save {{folder}}/checkpoints"
    ending = f"--save-interval {half} --exit-interval {half}"
    first = replace(
        job,
        name=f"{job.name}/first-half",
        iterations=half,
        arguments=(*job.arguments, *joined([evaluating, saving, ending])),
    )
    # Where the first half left its checkpoint, and what EnvPipe goes on with.
    left = f"{{scratch}}/{first.folder_name}"
    loading = f"--ckpt-format {setting.checkpoints} --load {left}/checkpoints"
    if any("--use-distributed-optimizer" in feature for feature in setting.features):
        # Without Apex and Transformer Engine, Megatron cannot load its state.
        loading += " --no-load-optim"
    second = replace(
        job,
        name=f"{job.name}/second-half",
        iterations=iterations - half,
        arguments=(
            *(a.replace("{folder}/envpipe", f"{left}/envpipe") for a in job.arguments),
            *joined([evaluating, loading]),
        ),
        after=first.name,
    )
    return [first, second]


@dataclass(frozen=True)
class Comparison:
    """An arm beside unmodified Megatron.

    Args:
        setting: its name.
        arm: that is compared.
        printed: whether all printed digits are equal.
        exact: whether losses and gradient norms are equal to the last bit.
        executed: whether the last iteration ran the planned order on every rank; None where the
            framework's own function ran it.
        iterations: that are compared.
        skipped: iterations that were skipped for their gradients, in each.
        differs_at: the first line that differs.
        imported: whether EnvPipe was imported.
    """

    setting: str
    arm: str
    printed: bool
    exact: bool
    executed: bool | None
    iterations: int
    skipped: int
    differs_at: str
    imported: bool

    @property
    def good(self) -> bool:
        """Whether this is as it should be."""
        wanted = self.arm in (ONE_F_ONE_B, ENVPIPE)
        return self.printed and self.executed is not False and self.imported == wanted


def compare(state: State, site_is_cpu: bool) -> list[Comparison]:
    """Every run of an arm that ended well against its stock run, if that did too."""
    size = TINY_ON_CPU if site_is_cpu else TINY
    mappings = {s.name: s.mapping for s in settings(10**6, size.llama)}
    comparisons = []
    for name, run in state.runs.items():
        if not name.startswith(f"{PART}/"):
            continue
        setting, arm, *half = name.split("/")[1:]
        stock = state.runs.get("/".join([PART, setting, STOCK, *half]), {})
        if arm == STOCK or run["status"] != "ok" or stock.get("status") != "ok":
            continue
        planned = (
            Planned(mappings[setting], size.microbatches, arm)
            if arm in (ONE_F_ONE_B, ENVPIPE)
            else None
        )
        comparisons.append(_compare("/".join([setting, *half]), arm, run, stock, planned))
    return comparisons


def _compare(
    setting: str, arm: str, run: dict[str, Any], stock: dict[str, Any], planned: Planned | None
) -> Comparison:
    mine, theirs = results_alone(run["printed"]), results_alone(stock["printed"])
    different = [
        f"{a.get('iteration', a.get('evaluated'))}: "
        + ", ".join(f"{k} {b.get(k)} -> {a.get(k)}" for k in {**a, **b} if a.get(k) != b.get(k))
        for a, b in zip(mine, theirs, strict=False)
        if a != b
    ]
    if len(mine) != len(theirs):
        different.append(f"{len(theirs)} -> {len(mine)} lines")
    return Comparison(
        setting=setting,
        arm=arm,
        printed=bool(mine) and not different,
        exact=_exact(run) == _exact(stock),
        executed=None if planned is None else _executed(run, planned),
        iterations=sum("iteration" in line for line in mine),
        skipped=max((rank["skipped"] for rank in run["ranks"]), default=0),
        differs_at=different[0] if different else "",
        imported=any(rank["imported_envpipe"] for rank in run["ranks"]),
    )


def _exact(run: dict[str, Any]) -> list[Any]:
    return [(rank["rank"], rank["losses"], rank["grad_norms"]) for rank in run["ranks"]]


def _executed(run: dict[str, Any], planned: Planned) -> bool:
    """Whether each rank's last iteration ran its stage's units in the planned order."""
    ranks: Sequence[Any] = run["ranks"]
    per_stage = len(ranks) // planned.mapping.pipeline  # Megatron's stages are outermost
    stages = planned.schedule.stages
    return bool(ranks) and all(
        rank["executed"] == [str(unit) for unit in stages[rank["rank"] // per_stage]]
        for rank in ranks
    )


def repeats(state: State, jobs_made: Sequence[Job], site_is_cpu: bool) -> list[Job]:
    """A second stock run of each setting in which an arm differs: does Megatron repeat itself?"""
    different = {c.setting.split("/")[0] for c in compare(state, site_is_cpu) if not c.exact}
    return [
        replace(
            job,
            name=job.name.replace(f"/{STOCK}", f"/{AGAIN}"),
            # Checkpoints of its own.
            arguments=tuple(a.replace(f".{STOCK}.", f".{AGAIN}.") for a in job.arguments),
            after=job.after and job.after.replace(f"/{STOCK}", f"/{AGAIN}"),
        )
        for job in jobs_made
        if job.name.split("/")[1] in different and job.name.split("/")[2] == STOCK
    ]
