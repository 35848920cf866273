"""What a training run of a test is told and tells; free of torch, so that tests start fast."""

from dataclasses import dataclass, field
from pathlib import Path

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.objective import LEAST_ENERGY, Objective

#: Iterations in the steady phase, where a job ends when it got there.
STEADY_STEPS = 2
#: A job that has not got there by now never will.
MAX_STEPS = 300


#: Options of `Job.reducer`.
OVERLAP = ("overlap_grad_reduce",)
ALIGNED = (*OVERLAP, "align_grad_reduce")
ALL = ("use_distributed_optimizer", *OVERLAP, "overlap_param_gather")


@dataclass(frozen=True)
class Job:
    """The job that both runs train.

    Args:
        group: microbatches of a chunk before the next one's, in Megatron's interleaved order; None
            for as many as there are stages.
        combined: whether Megatron overlaps the communication of experts: its interleaved function
            then calls another one, in whose place `training.in_turn` stands.
        counts: number of microbatches of each step, where that changes.
        bert: whether the model is Megatron's BERT, in place of its GPT.
        layers: of the whole model; None for one of each chunk, and at least two.
        lengths: of the sequences of each microbatch, in turn, where they vary.
        steps: how many; None ends `STEADY_STEPS` after EnvPipe has come to its steady phase.
        reducer: options of megatron-core's DistributedDataParallel that are on, or
            `align_grad_reduce` (a grad_sync_func); None trains untied replicas alone, by Adam.
        noise: share by which losses differ from run to run, by chance.
        evaluate_after: the step after which forwards alone are run, on other data.
    """

    stages: int
    microbatches: int = 6
    chunks: int = 1
    group: int | None = None
    combined: bool = False
    counts: tuple[int, ...] = ()
    bert: bool = False
    lengths: tuple[int, ...] = ()
    layers: int | None = None
    steps: int | None = 3
    tied: bool = False
    deallocate: bool = True
    reducer: tuple[str, ...] | None = None
    recompute: bool = False
    dropout: float = 0.0
    noise: float = 0.0
    per_token_loss: bool = False
    evaluate_after: int | None = None
    #: Ranks that share a stage; with sequence parallelism.
    tensor: int = 1
    #: `bf16` or `fp16`.
    half: str | None = None
    #: The power of two that losses of fp16 are scaled by at first; above 12, steps are skipped.
    loss_scale: int = 12
    #: Whether weight gradients go straight into `main_grad`, by a stand-in for Apex's kernel.
    fused: bool = False
    #: Of TransformerConfig, or of its subclass for multi-latent attention.
    options: tuple[tuple[str, object], ...] = ()
    latent: bool = False

    @property
    def connected(self) -> bool:
        """Return True if replicas exchange anything."""
        return self.reducer is not None or self.tied or self.tensor > 1

    @property
    def own_order(self) -> Schedule:
        """Megatron's."""
        if self.chunks == 1:
            return builders.one_f_one_b(self.stages, self.microbatches)
        return builders.interleaved(
            self.stages, self.microbatches, self.chunks, self.group, combined=self.combined
        )


@dataclass(frozen=True)
class Ours:
    """How EnvPipe runs it; none of it may change a bit of the result.

    Args:
        clocks_mhz: of the emulated GPUs; None for those of the preset.
        kept_orders: the orders that Megatron's own function is said to run, with hooks around
            units: one for each number of microbatches.
        checked: the order of a self-check in the second iteration, and whether whole backwards need
            one; it splits backwards where the job does. None without one.
        reads_only: whether clocks may not be set.
        slow_from: the iteration from which the first stage is late, see `plain_stages.be_late`.
        asks: what an operator asks for before these steps.
        fault: what of `training.FAULTS` goes wrong on the last stage, in EnvPipe's units.
    """

    schedule: str = "1f1b"
    policy: str = "baseline"
    reconfigure: str = "default"
    profile_file: Path | None = None
    warmup_iterations: int = 1
    plan_file: Path | None = None
    unit_s: float = 0.001
    clocks_mhz: tuple[int, ...] | None = None
    kept_orders: tuple[Schedule, ...] = ()
    checked: Schedule | None = None
    check_needed: bool = True
    asks: tuple[tuple[int, str], ...] = ()
    fault: str = ""
    splits: bool = False
    closed_loop: bool = False
    reads_only: bool = False
    slow_from: int | None = None
    objective: Objective = LEAST_ENERGY


Bits = dict[str, bytes]


@dataclass
class Result:
    """Results of one rank; tensors as their bytes, so that equal means equal to the bit.

    Args:
        losses: of each step, on the last stage.
        grads: of the last step, by a name that holds the global number of the layer.
        weights: after the last step, by the same names.
        evaluated: what evaluation reduced.
        executed: of each iteration, evaluation included, the units in the order they ran.
        locked_mhz: what this rank's GPU was told, in order.
        phases: of each training iteration.
        plan: what the session came to, with its profile and steps of reconfiguring.
        around: what Megatron or ours did between units: parameters gathered, gradients reduced, and
            layers that are computed again, each with the number of units so far.
        said: by a self-check, on one rank, and on all what it found to be different.
    """

    stage: int
    replica: int
    losses: list[list[bytes]] = field(default_factory=list)
    grads: Bits = field(default_factory=dict)
    weights: Bits = field(default_factory=dict)
    evaluated: list[bytes] = field(default_factory=list)
    executed: list[list[str]] = field(default_factory=list)
    locked_mhz: list[int] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    plan: Plan | None = None
    profile: Profile | None = None
    reconfigure_steps: int = 0
    around: list[tuple[object, ...]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    #: Of each second part of a backward, the weight gradients that it computed.
    put_off: list[int] = field(default_factory=list)
    skipped: int = 0
    failed: str | None = None
    #: Why backwards are not split, by a self-check.
    whole: str = ""
    notes: tuple[str, ...] = ()


def train(rank: int, job: Job, ours: Ours | None, root: Path) -> Result | None:
    """Run `training.train` in a rank."""
    import training

    return training.train(rank, job, ours, root)
