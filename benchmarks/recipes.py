"""Which level published training jobs get, and what rules out the next one.

    python benchmarks/recipes.py                                  # recipes of Megatron-Bridge
    python benchmarks/recipes.py CHECKOUT/tests/functional_tests  # jobs of a Megatron-LM checkout

A file is a list of recipes as ../shared/data/recipes has it, or a `model_config.yaml` of
Megatron-LM's functional tests; a folder stands for all of these below it. What a job switches on
becomes the arguments that Megatron-LM has for it, so that `decide` judges it as in training.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.outputs import leave, make_console, make_table, output_option
from envpipe_megatron.integrations.levels import (
    ArgumentLimit,
    Decision,
    Level,
    decide,
    limits_of_arguments,
    on,
)
from envpipe_megatron.integrations.megatron.arguments import read_flags, read_recipe
from envpipe_megatron.integrations.megatron.limits import LIMITS, NOT_PROVEN, keeps_whole

RECIPES = Path("../shared/data/recipes/megatron_bridge.json")
FUNCTIONAL_TEST = "model_config.yaml"
#: In training the model tells its class; here the kind of recipe does, by an argument of our own.
JOB_LIMITS = (
    *LIMITS,
    ArgumentLimit("a model other than GPTModel", Level.ORDER, NOT_PROVEN, on("other_model")),
)

#: A recipe's features as arguments. Where a number matters there is a field for it.
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "virtual_pipeline": {},
    "pipeline_layout": {},
    "context_parallel": {},
    "mixture_of_experts": {"num_experts": 8},
    # Which recipe is not said.
    "fp8_or_fp4": {"fp8": "hybrid", "fp8_recipe": "other"},
    "tp_comm_overlap": {"tp_comm_overlap": True},
    "cuda_graph_transformer_engine": {"cuda_graph_impl": "transformer_engine"},
    "cuda_graph_local": {"cuda_graph_impl": "local"},
    "cuda_graph_full_iteration": {"cuda_graph_scope": ["full_iteration"]},
    "multi_token_prediction": {"mtp_num_layers": 1},
    "multi_latent_attention": {"multi_latent_attention": True},
    "hybrid_model": {"is_hybrid_model": True},
    "vision_language": {"other_model": True},
    "sft_or_peft": {"sft": True},
    "recompute_selective": {"recompute_granularity": "selective"},
    "recompute_full": {"recompute_granularity": "full"},
    "overlap_moe_expert_parallel_comm": {"overlap_moe_expert_parallel_comm": True},
    "delay_wgrad_compute": {"delay_wgrad_compute": True},
    "defer_embedding_wgrad_compute": {"defer_embedding_wgrad_compute": True},
    "offloading": {"cpu_offloading": True},
    "fsdp": {"use_megatron_fsdp": True},
}
#: Folders of functional tests whose models are others than GPTModel, without a flag that says so.
_OTHER_MODELS = ("bert", "mimo", "multimodal-llava")


@dataclass(frozen=True)
class Job:
    """A published job: the set it belongs to, its name, and Megatron-LM's arguments for it."""

    source: str
    name: str
    args: Namespace

    @property
    def has_pipeline(self) -> bool:
        """Whether it has more than one stage."""
        return bool(self.args.pipeline_model_parallel_size > 1)

    @property
    def splits(self) -> bool:
        """Whether its backwards may be split, if a self-check holds."""
        return self.decide().level is Level.ORDER and not keeps_whole(self.args)

    def decide(self) -> Decision:
        """The highest level that it can have."""
        return decide(limits_of_arguments(self.args, JOB_LIMITS))


def read_jobs(path: Path) -> Iterator[Job]:
    """The training jobs of a file, or of all files below a folder."""
    if path.is_dir():
        for found in sorted(path.rglob(FUNCTIONAL_TEST)):
            yield from read_jobs(found)
    elif path.name == FUNCTIONAL_TEST:
        yield from _functional_test(path)
    else:
        yield from map(_recipe, json.loads(path.read_text()))


def _recipe(recipe: Mapping[str, Any]) -> Job:
    args: dict[str, Any] = {
        "pipeline_model_parallel_size": recipe["pp"],
        "virtual_pipeline_model_parallel_size": recipe["vp"],
        "tensor_model_parallel_size": recipe["tp"],
        "context_parallel_size": recipe["cp"],
        "expert_model_parallel_size": recipe["ep"],
    }
    for feature in recipe["features"]:
        args |= FEATURES[feature]
    source = recipe["set"] + (" (fine-tuning)" if args.get("sft") else "")
    return Job(source, recipe["recipe"].rpartition(":")[2], Namespace(**args))


def _functional_test(path: Path) -> Iterator[Job]:
    args = read_flags(read_recipe(path)[0])
    # Others serve, convert checkpoints, or are NeMo's.
    if not on("train_iters", "train_samples")(args):
        return
    args.other_model = path.parent.parent.name in _OTHER_MODELS
    yield Job("functional_tests", path.parent.name, args)


def job_rows(jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """For each job its level, and what rules out the next."""
    rows = []
    for job in jobs:
        found = job.decide()
        against = next(iter(found.against.values()), ())
        rows.append(
            {
                "source": job.source,
                "job": job.name,
                "pipeline": job.has_pipeline,
                "level": str(found.level),
                "splits": job.splits,
                "against_the_next": [limit.feature for limit in against],
            }
        )
    return rows


def total_rows(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For rows of jobs, how many get which level: of each source and of all, with and without."""
    sources = list(dict.fromkeys(job["source"] for job in jobs))
    rows = []
    for pipeline in (True, False):
        for source in [*sources, "all"]:
            found = [
                job
                for job in jobs
                if job["pipeline"] is pipeline and source in (job["source"], "all")
            ]
            levels = Counter(Level[job["level"].upper()] for job in found)
            if levels:
                rows.append(
                    {
                        "source": source,
                        "pipeline": pipeline,
                        "units_or_better_percent": _percent(levels, Level.UNITS),
                        "uniform_or_better_percent": _percent(levels, Level.UNIFORM),
                        "jobs": levels.total(),
                        **{str(level): levels[level] for level in reversed(Level)},
                        "splits": sum(job["splits"] for job in found),
                    }
                )
    return rows


def _percent(levels: Counter[Level], least: Level) -> float:
    return 100 * sum(levels[level] for level in Level if level >= least) / levels.total()


@click.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
@output_option("recipes")
def main(files: tuple[Path, ...], output: Path) -> None:
    """Print the level of each job in FILES; leave totals for jobs with a pipeline and without."""
    jobs = job_rows(job for path in files or [RECIPES] for job in read_jobs(path))
    totals = total_rows(jobs)
    shown = [{**row, "against_the_next": ", ".join(row["against_the_next"]) or "-"} for row in jobs]
    table = make_table("Level of each job", shown)
    table.columns[-1].no_wrap = False
    console = make_console()
    console.print(table)
    console.print(make_table("Jobs that get each level", totals))
    leave(output, "computed", {"recipes": totals})


if __name__ == "__main__":
    main()
