"""The jobs that stock and patched Megatron-LM train on the CPU."""

from dataclasses import dataclass
from pathlib import Path

from lm_runs import GPT, LLAMA, MOCK_DATA, OPTIMIZER, Run, run_pretrain
from on_request import on_request
from presets import preset_profile

from envpipe_megatron.core.kinds import Kind

full = on_request("LM")

MICROBATCHES, ITERATIONS, WARMUP = 8, 12, 3
PRESET, FORWARD_S = "a100-sxm", 0.01
#: Reconfiguring, a step of training for each 30 MHz, ends within a run.
CLOCKS_MHZ = (1410, 1290)

PP4 = "--pipeline-model-parallel-size 4"
PP2 = "--pipeline-model-parallel-size 2"
PP2TP2 = f"{PP2} --tensor-model-parallel-size 2"
PP2CP2 = f"{PP2} --context-parallel-size 2"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# So high that the first iterations overflow, and are skipped.
FP16 = "--fp16 --initial-loss-scale 2097152 --hysteresis 1 --loss-scale-window 4"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


@dataclass(frozen=True)
class Case:
    """A job that stock and patched Megatron-LM train.

    Args:
        length: batch size and number of samples; by default a constant size, for so many
            iterations.
    """

    mapping: str
    features: str = ""
    model: str = GPT
    data: str = MOCK_DATA
    length: str = ""
    #: Of a stage.
    chunks: int = 1

    @property
    def num_stages(self) -> int:
        return 4 if PP4 in self.mapping else 2

    @property
    def args(self) -> str:
        replicas = 4 // self.num_stages if self.mapping == PP2 else 1
        length = self.length or (
            f"--global-batch-size {MICROBATCHES * replicas} --train-iters {ITERATIONS} "
            "--lr-decay-iters 100"
        )
        return (
            f"{self.data} {self.model} {OPTIMIZER} {self.mapping} {self.features} {length} "
            "--log-interval 1 --eval-interval 5 --eval-iters 2"
        )

    @property
    def env(self) -> dict[str, str]:
        # Megatron-LM insists on it.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if self.mapping in (PP2TP2, PP2CP2) else {}


CASES = {
    "pp4": Case(PP4),
    "pp2tp2": Case(PP2TP2),
    "pp2dp2": Case(PP2),
    "pp2tp2-sequence": Case(PP2TP2, "--sequence-parallel"),
    "pp2dp2-overlapped": Case(PP2, OVERLAPPED),
    "pp4-untied": Case(PP4, "--untie-embeddings-and-output-weights"),
    "pp4-recompute": Case(PP4, RECOMPUTE),
    "pp4-bf16": Case(PP4, "--bf16"),
    "pp2dp2-overlapped-bf16": Case(PP2, f"{OVERLAPPED} --bf16"),
    "pp4-fp16": Case(PP4, FP16),
    "pp2dp2-overlapped-fp16": Case(PP2, f"{OVERLAPPED} {FP16}"),
    "llama-pp4": Case(PP4, model=LLAMA),
    "llama-pp2tp2-sequence": Case(PP2TP2, "--sequence-parallel", LLAMA),
    "llama-pp2dp2-overlapped-recompute": Case(PP2, f"{OVERLAPPED} {RECOMPUTE}", LLAMA),
    # A stage draws its random numbers in forwards, whose order is any schedule's.
    "pp2tp2-dropout-recompute": Case(PP2TP2, f"--sequence-parallel {RECOMPUTE} {DROPOUT}"),
}
ONE_F_ONE_B = "--envpipe-type uniform --envpipe-scheduling 1f1b"
ENVPIPE = "--envpipe-type envelope --envpipe-scheduling envpipe --envpipe-reconfigure balanced"
AUTO = "--envpipe-type optimal"


def run_case(
    checkout: Path,
    case: Case,
    args: str,
    folder: Path,
    *,
    attached: bool = False,
    forward_s: float = FORWARD_S,
) -> Run:
    """Train it, on emulated GPUs where EnvPipe asks for some."""
    run = run_pretrain(
        checkout,
        f"{case.args} {args}",
        folder,
        env={
            **case.env,
            "ENVPIPE_EMULATED_GPU": PRESET,
            "ENVPIPE_EMULATED_FORWARD_S": str(forward_s),
            "ENVPIPE_EMULATED_ROOT": str(folder / "gpus"),
        },
        attached=attached,
        timeout_s=600,
    )
    return run.require_success()


def write_profile(path: Path, num_stages: int) -> None:
    """Write what profiling the emulated GPUs would find, without the minute that it takes."""
    times_s = {Kind.FORWARD: FORWARD_S, Kind.BACKWARD: 2 * FORWARD_S}
    preset_profile(PRESET, num_stages, times_s, CLOCKS_MHZ[1:]).write(path)


def run_envpipe(
    checkout: Path, case: Case, folder: Path, how: str = ENVPIPE, *, attached: bool = False
) -> Run:
    """Train it with --envpipe, by a profile that lies beside the folder."""
    profile = folder.with_suffix(".csv")
    write_profile(profile, case.num_stages)
    return run_case(
        checkout,
        case,
        f"--envpipe {how} --envpipe-profile {profile} --envpipe-baseline-steps {WARMUP} "
        "--envpipe-output output",
        folder,
        attached=attached,
    )
