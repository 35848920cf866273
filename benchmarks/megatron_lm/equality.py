"""Losses and gradient norms of the patched checkout against the unmodified one's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.megatron_lm.models import (
    ALL_ARMS,
    APEX,
    EXPERTS,
    KEPT_ARMS,
    LOOP,
    MAPPINGS,
    NO_EVALUATION,
    OFF,
    ORDER_ARMS,
    PP2,
    PP2CP2,
    PP2DP2,
    PP2DP4,
    PP2TP2,
    PP4,
    PP4DP2,
    PP4TP2,
    PP8,
    SPLIT,
    STOCK,
    TINY,
    TINY_ON_CPU,
    TRANSFORMER_ENGINE,
    UNITS,
    WHOLE_ARMS,
    Mapping,
    Planned,
    Size,
    corpus_data,
    job_arguments,
    joined,
    planned,
    training,
)
from benchmarks.megatron_lm.running.jobs import DETERMINISTIC, Job, Site, State
from envpipe_megatron.formats.energy import Phase

PART = "equality"
#: Of the framework's order before the plan's, beyond those that the framework makes itself.
_WARMUP = 3
_BF16 = "--bf16"
_FP16 = (
    "--fp16 --initial-loss-scale 16777216 --min-loss-scale 1 --loss-scale-window 20 --hysteresis 1"
)

#: By Transformer Engine's buffers that ranks of a node share.
_OVERLAPPED_TENSORS = "--sequence-parallel --tp-comm-overlap --tp-comm-bootstrap-backend gloo"
#: Checkpoints are written by a process beside the job.
_ASYNC_SAVE = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
#: The optimizer's state in bf16, and gradients too.
_PRECISE_OPTIMIZER = (
    "--use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 "
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
)
#: Of two virtual stages on each of two ranks; the last of them has the further token alone.
_DEEPSEEK_LAYOUT = "Ett|ttt|ttt|mL"


@dataclass(frozen=True)
class Setting:
    """One job that all arms train; `checkpoints` is a format to save, end and load half-way.

    A setting that needs modules runs on GPUs alone, where these are installed.
    """

    name: str
    mapping: Mapping
    features: tuple[str, ...] = (_BF16,)
    arms: tuple[str, ...] = ORDER_ARMS
    checkpoints: str | None = None
    corpus: bool = False
    needs: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str | None]:
        """Beyond what every job gets."""
        return {**self.mapping.environment, **(DETERMINISTIC if self.needs else {})}


def size_of(cpu: bool) -> Size:
    """The model."""
    return TINY_ON_CPU if cpu else TINY


def settings(num_ranks: int, cpu: bool, hidden: int = TINY.hidden) -> list[Setting]:
    """All settings that fit, the most important first; widths beside `hidden` go by that."""
    made = []
    for mapping in MAPPINGS:
        gpt = f"gpt-{mapping.name}"
        kept = (UNITS,) if mapping.pipeline == mapping.num_ranks else ()
        made.append(Setting(gpt, mapping, arms=(*ORDER_ARMS, SPLIT, OFF, LOOP, *kept)))
        flags = (_BF16, mapping.distributed_optimizer())
        made.append(Setting(f"{gpt}-distopt", mapping, flags))
    llama, untied = size_of(cpu).llama, "--untie-embeddings-and-output-weights"
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    selective = "--recompute-granularity selective --recompute-modules core_attn"
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
        Setting("recompute-pp2", PP2, (_BF16, recompute), ALL_ARMS),
        Setting("recompute-selective-pp2", PP2, (_BF16, selective), ALL_ARMS),
        Setting("untied-pp2", PP2, (_BF16, untied), ALL_ARMS),
        Setting("sgd-pp2", PP2, (_BF16, "--optimizer sgd"), ALL_ARMS),
        Setting("moe-pp2", PP2, (_BF16, EXPERTS), ALL_ARMS),
        *[
            Setting(f"moe-{name}", over, (_BF16, EXPERTS, over.expert_parallel), ALL_ARMS)
            for name, over in (("pp2ep2", PP2DP2), ("pp4ep2", PP4DP2), ("pp2ep4", PP2DP4))
        ],
        Setting(
            "moe8-gathered-pp2ep2",
            PP2DP2,
            (
                _BF16,
                EXPERTS,
                "--num-experts 8 --moe-token-dispatcher-type allgather",
                PP2DP2.expert_parallel,
            ),
            ALL_ARMS,
        ),
    ]
    for mapping, chunks in (*itertools.product((PP2, PP4), (2, 4)), (PP4TP2, 2)):
        split = replace(mapping, chunks=chunks)
        made.append(Setting(f"gpt-{split.name}", split, arms=ALL_ARMS))
    split = replace(PP2DP2, chunks=2)
    made.append(Setting(f"gpt-{split.name}-distopt", split, (_BF16, overlapped), ALL_ARMS))
    if not cpu:
        made += _with_transformer_engine(hidden)
    return [setting for setting in made if setting.mapping.num_ranks <= num_ranks]


def _deepseek(hidden: int) -> str:
    """Of DeepSeek-V3's kind.

    Latent attention, a dense layer before those of experts, a shared expert, a router without
    auxiliary loss, and a further token that is predicted.
    """
    return (
        f"--multi-latent-attention --q-lora-rank {hidden // 2} --kv-lora-rank {hidden // 4} "
        "--qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --qk-layernorm "
        "--no-rope-fusion --position-embedding-type rope --normalization RMSNorm --swiglu "
        "--disable-bias-linear --untie-embeddings-and-output-weights "
        "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall --moe-layer-freq [0]+[1]*7 "
        f"--moe-ffn-hidden-size {hidden // 2} "
        f"--moe-shared-expert-intermediate-size {hidden // 2} "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --mtp-num-layers 1"
    )


def _with_transformer_engine(hidden: int) -> list[Setting]:
    made: list[Setting] = []
    deepseek = _deepseek(hidden)
    for mapping in (PP2, PP4, PP8):
        made += [
            Setting(f"te-bf16-{mapping.name}", mapping, arms=(*ALL_ARMS, LOOP)),
            Setting(f"te-fp8-{mapping.name}", mapping, (_BF16, "--fp8-format hybrid"), ALL_ARMS),
        ]
    experts = f"{EXPERTS} --moe-grouped-gemm {PP2DP2.expert_parallel}"
    fp8 = "--fp8-format hybrid"
    llama = f"{TINY.llama} --no-rope-fusion"
    any_order = {
        "te-bf16-pp2vp2": (replace(PP2, chunks=2), ""),
        "te-fp8-pp2vp2": (replace(PP2, chunks=2), fp8),
        "te-fp8-current-pp2": (PP2, f"{fp8} --fp8-recipe tensorwise"),
        "te-fp8-blocks-pp2": (PP2, f"{fp8} --fp8-recipe blockwise"),
        "te-llama-pp2": (PP2, llama),
        "te-llama-pp2vp2": (replace(PP2, chunks=2), llama),
        "te-llama-pp2vp4": (replace(PP2, chunks=4), llama),
        "te-llama-pp2vp2tp2": (replace(PP2TP2, chunks=2), f"{llama} --sequence-parallel"),
        "te-deepseek-pp2": (PP2, deepseek),
        "te-deepseek-pp2ep2": (PP2DP2, f"{deepseek} {PP2DP2.expert_parallel}"),
        "te-deepseek-pp2vp2": (replace(PP2, chunks=2, layout=_DEEPSEEK_LAYOUT), deepseek),
        "te-experts-pp2": (PP2, f"{EXPERTS} --moe-grouped-gemm"),
        "te-experts-pp2ep2": (PP2DP2, experts),
        "te-experts-pp2vp2ep2": (replace(PP2DP2, chunks=2), experts),
        "te-overlapped-tensors-pp2tp2": (PP2TP2, _OVERLAPPED_TENSORS),
        "te-recompute-pp2": (
            PP2,
            "--recompute-granularity selective --recompute-modules core_attn mlp",
        ),
        "te-precise-optimizer-pp2": (PP2, _PRECISE_OPTIMIZER),
        "te-pp2cp2": (PP2CP2, ""),
        "te-pp2vp2cp2": (replace(PP2CP2, chunks=2), ""),
    }
    kept = {
        "te-overlapped-experts-pp2vp2ep2": (replace(PP2DP2, chunks=2, combined=True), experts),
        "te-graphs-local-pp2": (PP2, "--cuda-graph-impl local"),
        "te-graphs-te-pp2": (PP2, "--cuda-graph-impl transformer_engine"),
    }
    grouped = f"{EXPERTS} --moe-grouped-gemm"
    fused = {"te-apex-pp2": "", "te-apex-experts-pp2": grouped, "te-apex-deepseek-pp2": deepseek}
    made += [
        Setting(name, PP2, (_BF16, what), ALL_ARMS, needs=(APEX,)) for name, what in fused.items()
    ]
    made.append(Setting("te-restart-pp2", PP2, (_BF16, _ASYNC_SAVE), checkpoints="torch_dist"))
    for name, (mapping, what) in {**any_order, **kept}.items():
        # Weight gradients of grouped experts are put off where they are fused.
        arms = WHOLE_ARMS if "--moe-grouped-gemm" in what else ALL_ARMS
        made.append(Setting(name, mapping, (_BF16, what), KEPT_ARMS if name in kept else arms))
    return [replace(setting, needs=(TRANSFORMER_ENGINE, *setting.needs)) for setting in made]


def left_out(site: Site) -> list[str]:
    """Names of settings that fit, but for modules that are not installed."""
    fitting = settings(site.num_ranks, site.cpu)
    return [setting.name for setting in fitting if not site.has.issuperset(setting.needs)]


def jobs(site: Site, iterations: int) -> list[Job]:
    """All jobs of all settings."""
    made = [
        job
        for setting in settings(site.num_ranks, site.cpu)
        if (site.corpus or not setting.corpus) and site.has.issuperset(setting.needs)
        for arm in setting.arms
        for job in _jobs_of(setting, arm, site, iterations)
    ]
    return sorted(made, key=lambda job: job.name.endswith(f"/{OFF}"))


def _jobs_of(setting: Setting, arm: str, site: Site, iterations: int) -> list[Job]:
    size = size_of(site.cpu).fitting(setting.mapping)
    plan = planned(setting.mapping, size, arm)
    job = Job(
        name=f"{PART}/{setting.name}/{arm}",
        arguments=job_arguments(
            site.cpu,
            size,
            setting.mapping,
            *setting.features,
            corpus_data() if setting.corpus else size.mock_data,
            training(iterations),
            plan.arguments(_WARMUP) if plan else "",
            needs=setting.needs,
        ),
        num_ranks=setting.mapping.num_ranks,
        iterations=iterations,
        patched=arm != STOCK,
        environment=setting.environment,
        plan=plan,
        mark_norms="--sequence-parallel" in setting.features,
    )
    if setting.checkpoints is None:
        return [_with(job, NO_EVALUATION)]
    half = iterations // 2
    # 0.16.1 ends in a checkpoint where --log-energy is off.
    energy = "" if site.cpu else "--log-energy"
    evaluating = f"--eval-interval {max(1, half // 2)} --eval-iters 2 {energy}"
    job = _with(job, evaluating, f"--ckpt-format {setting.checkpoints}")
    ending = f"--save {{folder}}/checkpoints --save-interval {half} --exit-interval {half}"
    first = replace(_with(job, ending), name=f"{job.name}/first-half", iterations=half)
    # Where the first half left its checkpoint, and what EnvPipe goes on with.
    left = f"{{scratch}}/{first.folder_name}"
    going_on = (a.replace("{folder}/envpipe", f"{left}/envpipe") for a in job.arguments)
    second = replace(
        job,
        name=f"{job.name}/second-half",
        iterations=iterations - half,
        arguments=(*going_on, "--load", f"{left}/checkpoints"),
        after=first.name,
    )
    if any("--use-distributed-optimizer" in feature for feature in setting.features):
        # Without Apex and Transformer Engine, Megatron cannot load its state.
        second = _with(second, "--no-load-optim")
    return [first, second]


def _with(job: Job, *parts: str) -> Job:
    return replace(job, arguments=(*job.arguments, *joined(parts)))


def rows(state: State, site_is_cpu: bool) -> list[dict[str, Any]]:
    """Every run of an arm that ended well beside its stock run, if that did too.

    `printed` and `exact` say whether all printed digits are equal, and losses and gradient norms
    to the last bit; `executed`, whether the last iteration ran the planned order on every rank
    (None where nothing was planned); `imported`, whether EnvPipe was.
    """
    mappings = {s.name: s.mapping for s in settings(10**6, site_is_cpu)}
    found = []
    for name, run in state.runs.items():
        if not name.startswith(f"{PART}/"):
            continue
        setting, arm, *half = name.split("/")[1:]
        stock = state.runs.get("/".join([PART, setting, STOCK, *half]), {})
        if arm == STOCK or run["status"] != "ok" or stock.get("status") != "ok":
            continue
        mapping = mappings[setting]
        plan = planned(mapping, size_of(site_is_cpu).fitting(mapping), arm)
        name = "/".join([setting, *half])
        found.append({"setting": name, "arm": arm, **_compared(run, stock, plan)})
    return found


def _compared(run: dict[str, Any], stock: dict[str, Any], plan: Planned | None) -> dict[str, Any]:
    mine, theirs = run["printed"], stock["printed"]
    different = [
        f"{a.get('iteration', a.get('evaluated'))}: "
        + ", ".join(f"{k} {b.get(k)} -> {a.get(k)}" for k in {**a, **b} if a.get(k) != b.get(k))
        for a, b in zip(mine, theirs, strict=False)
        if a != b
    ]
    if len(mine) != len(theirs):
        different.append(f"{len(theirs)} -> {len(mine)} lines")
    printed = bool(mine) and not different
    executed = None if plan is None else _executed(run, plan)
    imported = any(rank["imported_envpipe"] for rank in run["ranks"])
    return {
        "printed": printed,
        "exact": _exact(run) == _exact(stock),
        "executed": executed,
        "iterations": sum("iteration" in line for line in mine),
        "skipped": max((rank["skipped"] for rank in run["ranks"]), default=0),
        "differs_at": different[0] if different else "",
        "imported": imported,
        "good": printed and executed is not False and imported == (plan is not None),
    }


def _exact(run: dict[str, Any]) -> list[Any]:
    return [(rank["rank"], rank["losses"], rank["grad_norms"]) for rank in run["ranks"]]


def _executed(run: dict[str, Any], plan: Planned) -> bool:
    """Whether each rank's last iteration ran its stage's units in the planned order, by the plan.

    The phase tells where the warm-up has the same order. Of a plan that was made meanwhile, each
    unit must have run once.
    """
    ranks: Sequence[Any] = run["ranks"]
    per_stage = len(ranks) // plan.mapping.pipeline  # Megatron's stages are outermost
    labels = plan.schedule.labels()
    made_meanwhile = plan.arm == LOOP

    def ran(rank: Any) -> bool:
        executed, planned = rank["executed"], labels[rank["rank"] // per_stage]
        if made_meanwhile:
            return rank["phase"] != Phase.WARMUP and sorted(executed) == sorted(planned)
        return bool(rank["phase"] == Phase.STEADY and executed == planned)

    return bool(ranks) and all(map(ran, ranks))
