"""Published jobs and their levels: what their features ask for, and the counts."""

import json
from pathlib import Path

import pytest

from benchmarks.recipes import RECIPES, job_rows, read_jobs, total_rows

SHARED = Path(__file__).parents[2] / RECIPES


def recipe(pipeline, *features, chunks=None):
    return {
        "recipe": f"recipes/gpt.py:gpt_{'_'.join(features) or 'plain'}_pp{pipeline}",
        "set": "recipes",
        "pp": pipeline,
        "vp": chunks,
        "tp": 1,
        "cp": 1,
        "ep": 1,
        "precision": "bf16_mixed",
        "features": list(features),
    }


@pytest.fixture
def recipes(tmp_path):
    path = tmp_path / "recipes.json"
    listed = [
        recipe(1, "fp8_or_fp4"),
        recipe(4),
        recipe(4, "virtual_pipeline", chunks=2),
        recipe(2, "vision_language"),
        recipe(4, "cuda_graph_local", "cuda_graph_full_iteration"),
        recipe(4, "mixture_of_experts", "cuda_graph_local"),
    ]
    path.write_text(json.dumps(listed))
    return path


def test_published_recipes():
    if not SHARED.exists():
        pytest.skip(f"{RECIPES} is not there")
    jobs = job_rows(read_jobs(SHARED))
    totals = {row["pipeline"]: row for row in total_rows(jobs) if row["source"] == "all"}
    assert totals[True]["jobs"] + totals[False]["jobs"] == len(jobs) == 375
    assert all(row["uniform_or_better_percent"] == 100 for row in totals.values())
    assert totals[True]["units_or_better_percent"] > 94
    below = {
        feature
        for job in jobs
        if job["pipeline"] and job["level"] == "uniform"
        for feature in job["against_the_next"]
    }
    assert below == {"CUDA graphs over the full iteration"}
    checked = sum(job.has_pipeline and bool(job.decide().to_check) for job in read_jobs(SHARED))
    of_pipelines = totals[True]
    page = " ".join((Path(__file__).parents[2] / "docs" / "do" / "level.md").read_text().split())
    assert (
        f"{of_pipelines['jobs']} have a pipeline. {of_pipelines['order'] - checked} of these get "
        f"`order`, {checked} more if their self-check holds, {of_pipelines['units']} `units`"
    ) in page
    assert f"Of the {of_pipelines['order']}, {of_pipelines['splits']} may split backwards" in page


def test_features_become_arguments(recipes):
    jobs = list(read_jobs(recipes))
    assert [(job["level"], job["against_the_next"]) for job in job_rows(jobs)] == [
        ("uniform", ["no pipeline"]),
        ("order", []),
        ("order", []),
        ("order", []),
        ("uniform", ["CUDA graphs over the full iteration"]),
        ("units", ["CUDA graphs"]),
    ]
    assert [to_check(job) for job in jobs] == [
        [], [], [], ["a model other than GPTModel"], [], []
    ]  # fmt: skip


def to_check(job):
    return [limit.feature for limit in job.decide().to_check]


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ("--num-layers: 24\n  --num-layers-per-virtual-pipeline-stage: 2", 6),
        ("--num-virtual-stages-per-pipeline-rank: 4", 4),
        (r'--pipeline-model-parallel-layout: "Et*3\\|\\(tt\\|\\)*6mL"', 4),
        ("--hybrid-layer-pattern: M-M*|M-M|M-M*|M-M/*-|", 2),
        ("--num-layers: 24", 1),
    ],
)
def test_chunks_of_functional_tests(tmp_path, flags, chunks):
    path = functional_test(tmp_path, "gpt", f"--pipeline-model-parallel-size: 2\n  {flags}")
    (job,) = read_jobs(path)
    assert job.args.virtual_pipeline_model_parallel_size == chunks


def functional_test(root, kind, flags, *, trains=True):
    pytest.importorskip("yaml")
    path = root / "test_cases" / kind / "case" / "model_config.yaml"
    path.parent.mkdir(parents=True)
    length = "--train-iters: 50" if trains else "--prompts: hello"
    path.write_text(f"ENV_VARS: {{}}\nMODEL_ARGS:\n  {length}\n  {flags}\n")
    return path


def test_functional_tests_below_a_folder(tmp_path):
    pipeline = "--pipeline-model-parallel-size: 2"
    functional_test(
        tmp_path, "gpt", f"{pipeline}\n  --fp8-format: hybrid\n  --fp8-recipe: blockwise"
    )
    functional_test(tmp_path, "bert", pipeline)
    functional_test(tmp_path, "moe", f"{pipeline}\n  --rerun-mode: report_stats")
    functional_test(tmp_path, "inference", pipeline, trains=False)
    jobs = list(read_jobs(tmp_path))
    assert [to_check(job) for job in jobs] == [
        ["a model other than GPTModel"],
        ["FP4, and FP8 other than plain delayed scaling"],
        [],
    ]
    assert job_rows(jobs)[2]["against_the_next"] == ["--rerun-mode report_stats"]
