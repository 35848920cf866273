"""Reads Megatron-LM's arguments without Megatron, for `envpipe explain`.

From the words of a command or a recipe's file, names and values become what Megatron's own parser
makes of them as far as `limits` looks; which flags there are, and what they may be, is Megatron's
to say.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import read_text
from envpipe_megatron.integrations.levels import JobError
from envpipe_megatron.search.layer_profile import FULL, SELECTIVE

#: A flag of EnvPipe's, beside its options, that says what each stage recomputes.
RECOMPUTE_FLAG = "--envpipe-recompute"
#: Flags whose argument has another name.
_ARGUMENTS = {"fp8_format": "fp8", "fp4_format": "fp4"}
#: Megatron's defaults, where they are neither None nor off.
_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_SIZES = ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size")
#: Arguments that are reckoned with: whole numbers from 1, or 0 for none, and no more than these.
_COUNTS = (
    *_SIZES,
    "expert_model_parallel_size",
    "num_experts",
    "num_distributed_optimizer_instances",
    "tensor_parallel_num_weight_shards",
    "gtp_weight_remat_size",
    "expert_gtp_weight_remat_size",
    "fp8_amax_history_len",
    "timing_log_level",
    "micro_batch_size",
    "global_batch_size",
    "num_layers",
    "encoder_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_virtual_pipeline_stage",
)
_MAY_BE_0 = ("num_experts", "timing_log_level")
_MOST = 1_000_000
#: Arguments that list names.
_LISTS = ("cuda_graph_scope", "cuda_graph_modules")
#: Tables of a recipe: flags and variables.
_TABLES = ("MODEL_ARGS", "ENV_VARS")


def read_flags(words: Sequence[str]) -> Namespace:
    """Read `--name value ...` and `--name=value`; of a flag that is there twice, the last counts.

    Raises EnvPipeError for a word that belongs to no flag, a count that is none, and a name that is
    a number or missing.
    """
    begins = [place for place, word in enumerate(words) if word.startswith("--")]
    if words and begins[:1] != [0]:
        raise EnvPipeError("Flags of Megatron-LM begin with --", value=words[0])
    args = Namespace(**dict.fromkeys(_SIZES, 1), **_DROPOUT)
    for begin, end in pairwise([*begins, len(words)]):
        flag, equals, value = words[begin].partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        values = [*([value] if equals else ()), *words[begin + 1 : end]]
        setattr(args, _ARGUMENTS.get(name, name), _value(values))
    for name in _COUNTS:
        count, least = getattr(args, name, None), int(name not in _MAY_BE_0)
        if count is not None and (type(count) is not int or not least <= count <= _MOST):
            raise EnvPipeError(
                f"{_flag(name)} is a whole number from {least} to {_MOST:,}", value=count
            )
    for name in _LISTS:
        if not isinstance(value := getattr(args, name, ""), str | list):
            raise EnvPipeError(f"{_flag(name)} takes names", value=value)
    args.virtual_pipeline_model_parallel_size = _num_chunks(args)
    if getattr(args, "recompute_activations", False):
        args.recompute_granularity = "selective"
    if getattr(args, "cpu_offloading_num_layers", 0):
        args.cpu_offloading = True
    if shards := getattr(args, "tensor_parallel_num_weight_shards", None):
        args.gtp_weight_remat_size = shards // args.tensor_model_parallel_size
    return args


def read_recipe(path: Path) -> tuple[list[str], dict[str, str]]:
    """Read a `model_config.yaml` of Megatron-LM's functional tests, or a table of flags.

    Returns the words of a command line and environment variables, of its tables `MODEL_ARGS` and
    `ENV_VARS`. A file that has neither is a table of flags itself. Names may lack the dashes, true
    and false are for flags without a value, and JSON is YAML, too.

    Raises EnvPipeError if the file is no such table.
    """
    import yaml  # type: ignore[import-untyped]  # for these files only

    try:
        table = yaml.safe_load(read_text(path))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise EnvPipeError(f"{path} is neither YAML nor JSON: {error}") from error
    own = isinstance(table, dict) and {*_TABLES} & table.keys()
    flags, variables = (table.get(name) or {} for name in _TABLES) if own else (table, {})
    if not (isinstance(flags, dict) and isinstance(variables, dict)):
        raise EnvPipeError(
            f"{path} has no table of flags",
            remedy="Write a flag and its value a line, such as pipeline-model-parallel-size: 4.",
        )
    words = [word for flag, value in flags.items() for word in _words(str(flag), value)]
    settings = {str(name): str(value) for name, value in variables.items()}
    for name, value in settings.items():
        if not name or "=" in name or "\0" in name + value:
            raise EnvPipeError(
                f"{path} has a variable that no environment can hold",
                value=f"{name}={value}",
                remedy="Give it a name without =, in ENV_VARS.",
            )
    return words, settings


def by_stage(args: Namespace) -> list[tuple[str, int]] | None:
    """Return what each stage recomputes, and of how many layers; None if none is given.

    Raises JobError: unreadable, not one for each stage, of a hybrid model, or beside Megatron's own
    flag.
    """
    text = getattr(args, "envpipe_recompute", None)
    if text is None:
        return None
    if granularity := getattr(args, "recompute_granularity", None):
        raise JobError(
            f"{RECOMPUTE_FLAG} cannot be combined with --recompute-granularity",
            value=granularity,
            remedy="Leave out one of the two.",
        )
    if pattern := _hybrid_pattern(args) or getattr(args, "is_hybrid_model", False):
        raise JobError(
            f"{RECOMPUTE_FLAG} is for transformer blocks, and a hybrid model has none",
            value=pattern,
            remedy="Use --recompute-granularity.",
        )
    stages = [_recomputed(part) for part in str(text).split(",")]
    if len(stages) != args.pipeline_model_parallel_size:
        raise JobError(
            f"{RECOMPUTE_FLAG} says what {len(stages)} stages recompute",
            value=text,
            remedy=f"The job has {args.pipeline_model_parallel_size}; say it for each.",
        )
    return stages


def _words(flag: str, value: object) -> list[str]:
    """Write a flag as in a command line; `"[a b]"` is a list, too."""
    flag = _flag(flag.removeprefix("--"))
    if value is None or value is False:
        return []
    if isinstance(value, str) and value.startswith("["):
        value = value.strip("[]").split()
    values = [] if value is True else value if isinstance(value, list) else [value]
    return [flag, *map(str, values)]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _value(words: Sequence[str]) -> object:
    """Return a flag's value: a number or word, several as a list, or True without any."""
    values = [_number(word) for word in words] or [True]
    return values[0] if len(values) == 1 else values


def _number(word: str) -> object:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


def _num_chunks(args: Namespace) -> int:
    """Return the chunks of a stage, V, by the flags from which Megatron-LM counts them."""
    stages: int = args.pipeline_model_parallel_size
    pattern = _hybrid_pattern(args).split("/")[0]
    layout = str(getattr(args, "pipeline_model_parallel_layout", None) or pattern)
    if "|" in layout:
        return (_repeated(layout).count("|") + 1) // stages
    layers: int | None = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if layers:
        of_model: int = getattr(args, "num_layers", 0) or getattr(args, "encoder_num_layers", 0)
        for part in ("embedding", "loss"):  # each may count as a layer
            of_model += bool(getattr(args, f"account_for_{part}_in_pipeline_split", False))
        return of_model // stages // layers
    return getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1


def _hybrid_pattern(args: Namespace) -> str:
    """Return the layers of a hybrid (Mamba) model; empty for others."""
    patterns = (getattr(args, f"hybrid_{of}_pattern", None) for of in ("layer", "override"))
    return str(next(filter(None, patterns), ""))


def _repeated(layout: str) -> str:
    """Write a layout such as `Et*2|(tt|)*5L` without its repetitions."""
    layout = layout.replace("\\", "")
    for repeats in (r"\(([^()]*)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        layout = re.sub(repeats, lambda found: found[1] * int(found[2]), layout)
    return layout


def _recomputed(text: str) -> tuple[str, int]:
    what, _, count = text.strip().partition(":")
    if (what == "none" and not count) or (what in (FULL, SELECTIVE) and count.isdecimal()):
        return what, int(count or 0)
    raise JobError(
        f"{RECOMPUTE_FLAG} is wrong",
        value=text,
        remedy="Say none, full:N or selective:N for each stage.",
    )
