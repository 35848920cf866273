"""What `envpipe explain` says is what the job's own functions decide, and what pages show."""

import itertools
import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.levels import (
    JobError,
    Level,
    decide,
    limits_of_arguments,
)
from envpipe_megatron.integrations.megatron.arguments import read_flags, read_recipe
from envpipe_megatron.integrations.megatron.explain import (
    SEEN,
    PlannedJob,
    _never_tried,
    _seen_like,
    explain,
)
from envpipe_megatron.integrations.megatron.limits import LIMITS, POSTED_AHEAD
from envpipe_megatron.runtime.job.options import JobOptions

DOCS = Path(__file__).parents[3] / "docs"
PIPELINE = "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 64"


def explained(flags, options=None, environment=None, **placed):
    args = read_flags(f"{PIPELINE} {flags}".split())
    job = PlannedJob(args, options or JobOptions(level=None), **placed)
    titles = ("gets", "way", "proven", "carries", "seen", "never", "start")
    with patch.dict(os.environ, environment or {}):
        return dict(zip(titles, explain(job).values(), strict=True))


@pytest.mark.parametrize(
    "flags",
    [
        "--num-experts 8 --expert-model-parallel-size 2",
        "--cuda-graph-impl local",
        "--cuda-graph-impl local --cuda-graph-scope attn full_iteration",
        "--use-megatron-fsdp",
        "--fp8-format hybrid --fp8-recipe delayed",
        "--fp8-format=hybrid --fp8-recipe=blockwise",
        "--skip-train",
        "--pipeline-model-parallel-size 1",
        "--tp-comm-overlap --no-such-flag of a fork",
        "",
    ],
)
def test_the_level_is_the_jobs_own_with_each_limit_by_name(flags):
    said = explained(flags)
    decision = decide(limits_of_arguments(read_flags(f"{PIPELINE} {flags}".split()), LIMITS))
    assert said["gets"][0].startswith(f"level {decision.level}: ")
    against = {str(limit) for limits in decision.against.values() for limit in limits}
    assert len(said["way"]) == max(1, len(against))
    assert all(any(limit in line for line in said["way"]) for limit in against)
    for limit in decision.to_check:
        assert f"checked in the first iterations, else level units: {limit}" in said["proven"]


def test_options_count_as_in_a_job():
    assert "nothing is changed" in explained("", JobOptions(level=Level.OBSERVE))["gets"][1]
    unchecked = JobOptions(level=None, self_check="off")
    assert explained("--num-experts 8", unchecked)["gets"][0].startswith("level units")
    assert "--envpipe-self-check off" in explained("", unchecked)["proven"][-1]
    split = explained("", JobOptions(level=None, split="off"))
    assert split["proven"][-1] == "backwards stay whole: --envpipe-split off"
    assert "tp_comm_overlap" in explained("--tp-comm-overlap")["proven"][-1]
    without = explained("", JobOptions(level=None, gpu_control="none"))
    assert not any("least energy, corrected" in line for line in without["gets"])
    assert all("no clock changed" in line for line in without["seen"])
    with pytest.raises(JobError, match="CUDA graphs"):
        explained("--cuda-graph-impl local", JobOptions(level=Level.ORDER))
    with pytest.raises(JobError, match="cannot meter"):
        explained("--inprocess-restart")


def test_with_chunks_an_order_whose_forwards_draw_stays_megatrons():
    chunks = "--num-layers 16 --num-layers-per-virtual-pipeline-stage 2"
    kept = explained(chunks)
    assert "order 1f1b" in kept["gets"][1]  # Megatron's dropout is 0.1 by default
    assert "--hidden-dropout 0 --attention-dropout 0" in kept["way"][-1]
    searched = explained(f"{chunks} --hidden-dropout 0 --attention-dropout 0.0")
    assert "order auto" in searched["gets"][1]
    assert searched["way"] == ["nothing: there is no higher level"]


@pytest.mark.parametrize("mapping", ["", "--use-tp-pp-dp-mapping"])
@pytest.mark.parametrize("per_node", [1, 2, 4, 8, 16])
def test_boundaries_cross_nodes_where_ranks_of_neighbours_do(per_node, mapping):
    flags = f"--tensor-model-parallel-size 2 {mapping}"
    args = read_flags(f"{PIPELINE} {flags}".split())
    job = PlannedJob(args, JobOptions(), nodes=32 // per_node, ranks_per_node=per_node)
    ranks = list(range(32))
    # 4 stages, 4 replicas, 2 tensor-parallel ranks, as Megatron numbers them.
    strides = (8, 2) if not mapping else (2, 8)
    pipelines = [
        [first + stage * strides[0] for stage in range(4)]
        for first in ranks
        if first // strides[0] % 4 == 0
    ]
    crossing = {
        stage
        for ranks_of in pipelines
        for stage, (one, other) in enumerate(itertools.pairwise(ranks_of))
        if one // per_node != other // per_node
    }
    assert job.over_nccl() == len(crossing)
    assert job.microbatches == 64 // 4


def test_one_hardware_queue_over_nccl_lowers_what_must_check_itself():
    one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    over_nodes = {"environment": one_queue, "nodes": 4, "ranks_per_node": 1}
    said = explained("--num-experts 8", **over_nodes)
    assert said["gets"][0].startswith("level units")
    assert said["way"] == [f"of level order: mixture of experts ({POSTED_AHEAD})"]
    with pytest.raises(JobError, match="mixture of experts"):
        explained("--num-experts 8", JobOptions(level=Level.ORDER), **over_nodes)
    assert (
        "between nodes (3 of 3 boundaries): NCCL's receives"
        in explained("", **over_nodes)["carries"]
    )
    within = explained("--num-experts 8", environment=one_queue)
    assert within["gets"][0].startswith("level order")
    assert within["carries"][-1].endswith(f"level units: {POSTED_AHEAD}")
    plain = explained("", environment=one_queue)["carries"]
    assert plain[-1].endswith("neighbours' extra forwards are kept close")
    assert len(explained("")["carries"]) == 1
    demanded = explained("--tensor-model-parallel-size 2")["carries"]
    assert "not set here, and Megatron demands it" in demanded[-1]
    eight_queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert len(explained("--context-parallel-size 2", environment=eight_queues)["carries"]) == 1
    receives = explained("", JobOptions(level=None, channel="receives"))["carries"]
    assert receives == ["as asked for (3 of 3 boundaries): NCCL's receives"]


def test_figures_are_on_pages():
    """Each is on a page or in a row of it, as it is said or as the ratio that it is of."""
    files = [*DOCS.rglob("*.md"), *DOCS.rglob("*.jsonl")]
    pages = " ".join(path.read_text() for path in files)
    for row in SEEN:
        percents = re.findall(r"([\d.]+) % (less|more)", row.result)
        assert percents, row
        for percent, more in percents:
            ratio = 1 + float(percent) / 100 * (1 if more == "more" else -1)
            written = (percent, f"{ratio:.3f}", f"{ratio:.4f}")
            assert any(re.search(rf"(?<![\d.]){re.escape(one)}", pages) for one in written), row


def like(flags, level, *, splits, clocks=True):
    job = PlannedJob(read_flags(flags.split()), JobOptions())
    return _seen_like(job, level, splits=splits, clocks=clocks)


def test_what_was_seen_is_of_jobs_like_it():
    flags = "--pipeline-model-parallel-size 8"
    split, whole = (like(flags, Level.ORDER, splits=splits) for splits in (True, False))
    assert {row.stages for row in split if row.gpu.startswith("A")} == {8}
    assert any(row.split for row in split)
    assert not any(row.split for row in whole)
    chunks = f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 3"
    assert {row.chunks for row in like(chunks, Level.UNITS, splits=False)} == {2, 4}
    assert like(flags, Level.UNIFORM, splits=False) == []
    experts = f"{PIPELINE} --num-experts 8"
    (seen,) = like(experts, Level.ORDER, splits=True, clocks=False)
    assert "experts" in seen.how
    assert not any("experts" in row.how for row in (*split, *whole))
    for row in (*split, *whole):
        assert "measured" in row.how or "emulated" in row.how


def test_what_was_never_tried():
    said = explained("--recompute-granularity selective --optimizer sgd", nodes=2, ranks_per_node=2)
    assert len([line for line in said["never"] if line.endswith("not compared")]) == 2
    assert not any("4 GPUs" in line for line in said["never"])
    assert any("4 GPUs" in line for line in explained("", nodes=2, ranks_per_node=4)["never"])
    one_rank = PlannedJob(read_flags([]), JobOptions())
    assert not any("clock" in line for line in _never_tried(one_rank, Level.OBSERVE))
    assert any("clock" in line for line in _never_tried(one_rank, Level.UNIFORM))


def test_arguments_as_megatron_has_them(tmp_path):
    args = read_flags(
        [
            "--a",
            "1",
            "--b=x",
            "--c",
            "1.5",
            "2",
            "--d",
            "--a",
            "3",
            "--tensor-model-parallel-size",
            "2",
        ]
    )
    assert (args.a, args.b, args.c, args.d) == (3, "x", [1.5, 2], True)
    weights = ["--tensor-model-parallel-size", "2", "--tensor-parallel-num-weight-shards", "8"]
    assert read_flags(weights).gtp_weight_remat_size == 4
    with pytest.raises(EnvPipeError, match="begin with --"):
        read_flags(["oops"])
    with pytest.raises(EnvPipeError, match="pipeline-model-parallel-size is a whole number"):
        read_flags(["--pipeline-model-parallel-size", "$PP"])
    with pytest.raises(EnvPipeError, match="cannot be divided"):
        PlannedJob(read_flags(PIPELINE.split()), JobOptions(), nodes=1, ranks_per_node=6)
    path = tmp_path / "recipe.yaml"
    path.write_text("fp8_format: hybrid\n--recompute: true\nsave: null\n--modules: [a, 1]\n")
    words = ["--fp8-format", "hybrid", "--recompute", "--modules", "a", "1"]
    assert read_recipe(path) == (words, {})
    for wrong in ("just text", "a: [1", "- 1", "MODEL_ARGS: x", "ENV_VARS: [1]", "[" * 9999):
        path.write_text(wrong)
        with pytest.raises(EnvPipeError, match=r"no table of flags|neither YAML nor JSON"):
            read_recipe(path)
    path.write_text("ENV_VARS: {'A=B': 1}\nMODEL_ARGS: {}\n")
    with pytest.raises(EnvPipeError, match="no environment can hold"):
        read_recipe(path)


@pytest.mark.parametrize(
    "flags",
    [
        "--micro-batch-size 0",
        "--num-experts x",
        "--pipeline-model-parallel-size 1e30",
        "--tensor-model-parallel-size",
        "--global-batch-size 9999999999999999",
        "--num-layers -4",
        "--timing-log-level x",
        "--fp8-amax-history-len 1 2",
        "--gtp-weight-remat-size 0",
        "--expert-gtp-weight-remat-size x",
        "--cuda-graph-scope 4",
        "--cuda-graph-modules",
    ],
)
def test_a_value_that_megatron_refuses_is_named(flags):
    with pytest.raises(EnvPipeError, match=f"{flags.split()[0]} (is a whole number|takes names)"):
        read_flags(flags.split())
    layouts = "--pipeline-model-parallel-layout x*99999999999|t --hybrid-layer-pattern 5"
    assert read_flags(layouts.split()).virtual_pipeline_model_parallel_size == 2


def test_arguments_that_megatron_makes_of_others():
    assert explained("--cpu-offloading-num-layers 2")["gets"][0].startswith("level units")
    said = explained("--fp8-format hybrid --recompute-activations")
    assert any("FP8 other than plain delayed scaling" in line for line in said["proven"])
    assert any("selective recomputation" in line for line in said["never"])
    assert explained("--num-experts 0")["gets"] == explained("")["gets"]
    also = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    chunks = f"--num-layers 30 {also} --num-layers-per-virtual-pipeline-stage 4"
    for flags in (chunks, "--hybrid-override-pattern M|*|M|*|M|*|M|*"):
        assert any("4 of 2 virtual ones" in line for line in explained(flags)["gets"])
