"""Starts Megatron-DeepSpeed's training scripts on the CPU, and reads their logs."""

import importlib.util
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

from lm_runs import Run
from torchrun_ranks import run_ranks

HERE = Path(__file__).parent
CPU_RUN = HERE / "mds_cpu_run.py"
STAGES, MICROBATCHES, ITERATIONS, WARMUP = 4, 8, 12, 3
PRESET, FORWARD_S = "a100-sxm", 0.02

_MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 "
    "--attention-dropout 0 --hidden-dropout 0"
)
_JOB = (
    f"--deepspeed --zero-stage 0 --pipeline-model-parallel-size {STAGES} --micro-batch-size 1 "
    f"--global-batch-size {MICROBATCHES} --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 100 "
    "--log-interval 1 --num-workers 0 --distributed-backend gloo --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion"
)


def missing() -> list[str]:
    """Return what a run needs and is not installed."""
    modules = ("torch", "deepspeed", "transformers", "pybind11", "einops", "regex", "six")
    return [name for name in modules if importlib.util.find_spec(name) is None] + [
        name for name in ("make", "g++") if shutil.which(name) is None
    ]


def gpt_args(data: Path) -> str:
    """Return the arguments of `pretrain_gpt.py`."""
    return (
        f"{_MODEL} {_JOB} --seq-length 32 --max-position-embeddings 32 --eval-interval 5 "
        f"--eval-iters 2 --tokenizer-type NullTokenizer --vocab-size 63 "
        f"--data-path {data / 'text_document'} --data-impl mmap --split 80,10,10"
    )


def run_script(
    script: Path,
    args: str,
    folder: Path,
    *,
    iterations: int = ITERATIONS,
    timeout_s: float = 300,
) -> Run:
    """Run a checkout's training script under torchrun on the CPU, until it ends.

    Args:
        script: of a checkout, which compiles its helpers of datasets in itself.
        args: what goes after the script.
        folder: a new folder for the logs; also the working directory.
        iterations: to train, if `args` say no number of samples.
        timeout_s: after which the run is ended.
    """
    configuration = {
        "train_batch_size": MICROBATCHES,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 5,
        "zero_optimization": {"stage": 0},
    }
    file = folder.with_name(f"{folder.name}-deepspeed.json")  # a profile's facts are in .json
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(configuration))
    program = [str(CPU_RUN), str(script), *shlex.split(args), "--deepspeed_config", str(file)]
    if "--train-samples" not in args:
        program += ["--train-iters", str(iterations)]
    environment = {
        # Its Makefile asks `python3` where pybind11 is.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(STAGES),
        "ENVPIPE_EMULATED_GPU": PRESET,
        "ENVPIPE_EMULATED_FORWARD_S": str(FORWARD_S),
        "ENVPIPE_EMULATED_ROOT": str(folder / "gpus"),
    }
    ended = run_ranks(program, CPU_RUN, folder, nproc=STAGES, env=environment, timeout_s=timeout_s)
    return Run(**vars(ended))
