"""Ranks that train small pipelines by DeepSpeed's own engine, and again by EnvPipe's orders.

Started with DS_ACCELERATOR=cpu. Args: a folder, numbers of ranks and of steps, and names of `CASES`
or `loop of` a model. Each rank leaves `rank-<n>.json`: by case and run the losses, a digest of the
weights, and what EnvPipe did.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from envpipe_megatron.runtime.job.options import JobOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
import deepspeed
import plain_stages
import torch
import torch._dynamo  # an optimizer does, in each rank: it takes seconds
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from forked_ranks import run_forked
from presets import preset_profile
from transformers import BertConfig, GPT2Config, LlamaConfig
from waiting_plans import plans_are_waited_for
from whole_layers import write_layers

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.base import ReadOnlyGpu
from envpipe_megatron.gpu.control import Control
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.integrations import job as job_module
from envpipe_megatron.integrations.deepspeed import EnvPipeEngine, end_training, initialize
from envpipe_megatron.integrations.deepspeed.partition import PipelineModule
from envpipe_megatron.integrations.device import Device
from envpipe_megatron.integrations.huggingface import split_model
from envpipe_megatron.integrations.huggingface.deepspeed_stages import deepspeed_layers
from envpipe_megatron.integrations.huggingface.layers import language_model_loss
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.execution.executor import EmulatedExecutor

MICROBATCHES, MICROBATCH, LENGTH = 6, 2, 5
TIMES_S = {Kind.FORWARD: 0.02, Kind.BACKWARD: 0.04}
#: A loop of a model where no clock may be set.
WITHOUT = " without control"
WORDS, LONGEST = 11, LENGTH + MICROBATCHES


class Packed(torch.nn.Module):
    """Hands on a tuple of one tensor."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor]:
        return (hidden,)


class Unpacked(torch.nn.Module):
    """Of a tensor it would take the first sample alone."""

    def forward(self, hidden: tuple[torch.Tensor]) -> torch.Tensor:
        return hidden[0]


CONFIGS = {
    "gpt2": GPT2Config(
        vocab_size=WORDS,
        n_positions=LONGEST,
        n_embd=8,
        n_layer=4,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "llama": LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
    "bert": BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
    ),
}


def layers_of(model: str) -> list[Any]:
    """Of a model; `packed` is GPT-2 in two stages, with a tuple of one between them."""
    if model == "packed":
        layers = layers_of("gpt2")
        return [*layers[:4], LayerSpec(Packed), LayerSpec(Unpacked), *layers[4:]]
    return deepspeed_layers(split_model(CONFIGS[model]))


#: What EnvPipe is asked for; `gpipe` runs a plan by file.
RUNS: dict[str, dict[str, Any]] = {
    "1f1b baseline": {"type": "baseline"},
    "1f1b uniform": {"type": "uniform"},
    "1f1b balanced": {"type": "envelope", "scheduling": "1f1b", "reconfig": "balanced"},
    "ours default": {"type": "envelope", "scheduling": "ours", "reconfig": "default"},
    "ours greedy": {"type": "envelope", "scheduling": "ours", "reconfig": "greedy"},
    "ours balanced": {"type": "envelope", "scheduling": "ours", "reconfig": "balanced"},
    "auto optimal": {"type": "optimal", "scheduling": "auto"},
    "gpipe": {"plan": "gpipe.json"},
}


@dataclass(frozen=True)
class Case:
    """A pipeline, and which of EnvPipe's runs are held against DeepSpeed's own.

    Without a number of stages, one on each rank.
    """

    model: str
    runs: tuple[str, ...]
    num_stages: int = int(sys.argv[2])
    tensor_parallel: int = 1
    vary: bool = False
    partition: str = "uniform"
    config: dict[str, Any] = field(default_factory=dict)


_BF16 = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "data_types": {"grad_accum_dtype": "fp32"},
}
CASES = {
    "gpt2": Case("gpt2", ("ours balanced", "gpipe")),
    "mask": Case("bert", ("auto optimal",)),
    "varying lengths": Case("gpt2", ("ours balanced",), vary=True, partition="type:GPT2Block"),
    "partitioned activations": Case(
        "bert", ("ours default",), num_stages=2, tensor_parallel=2, partition="parameters"
    ),
    "replicas in bf16": Case(
        "llama", ("ours balanced",), num_stages=2, partition="time:layers.json", config=_BF16
    ),
    "tuples of one": Case("packed", ("ours greedy",), num_stages=2),
    **{f"all of {name}": Case(name, tuple(RUNS)) for name in ("gpt2", "llama", "bert")},
}


class FastJobs:
    """Jobs on emulated GPUs whose sleeps are jumped over."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self.time = plain_stages.FastTime()
        job_module.open_device = self.open_device

    def open_device(self, collectives: Any, stages: int, options: JobOptions) -> Device:
        self._made += 1
        gpu = EmulatedGpu.create(
            "a100-sxm", int(os.environ["RANK"]), self._folder / f"gpus-{self._made}"
        )
        self.time.install(gpu)
        wanted = options.gpu_control
        reads = wanted == "none"
        return Device(
            ReadOnlyGpu(gpu) if reads else gpu,
            Control(wanted, None if reads else "emulated", "this is a test"),
            lambda settle: EmulatedExecutor(gpu, TIMES_S, collectives, settle),
        )

    def follow(self, engine: EnvPipeEngine) -> None:
        """Let the meter see the time that is jumped over."""
        self.time.meanwhile = engine.session.parts.meter._try_sample


def batches(model: str, vary: bool) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(5)
    number = 0
    while True:
        length = LENGTH + number % MICROBATCHES if vary else LENGTH
        size = (MICROBATCH, length + 1)
        words = torch.randint(WORDS, size, generator=generator)
        number += 1
        if model != "bert":
            yield words[:, :-1], words[:, 1:]
            continue
        is_token = torch.arange(length).expand(MICROBATCH, length) < length - number % 2
        yield (words[:, :-1], (words[:, 1:] > 5).long(), is_token), words[:, :-1]


def make_engine(case: Case, settings: dict[str, Any] | None) -> Any:
    replicas = dist.get_world_size() // (case.num_stages * case.tensor_parallel)
    torch.manual_seed(1)
    model = PipelineModule(
        layers_of(case.model),
        topology=PipeModelDataParallelTopology(
            num_pp=case.num_stages, num_mp=case.tensor_parallel, num_dp=replicas
        ),
        loss_fn=language_model_loss,
        partition_method=case.partition,
        dynamic_shape=case.vary,
    )
    engine, *_ = initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": MICROBATCH,
            "gradient_accumulation_steps": MICROBATCHES,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
            "gradient_clipping": 1.0,
            "steps_per_print": 4,
            **case.config,
            **({} if settings is None else {"envpipe": settings}),
        },
    )
    if case.partition.startswith("time:"):
        assert model.parts == [0, 5, 7], "the head is heavy"
    engine.set_has_attention_mask(case.model == "bert")
    torch.manual_seed(7)
    return engine


def train(
    jobs: FastJobs, case: Case, settings: dict[str, Any] | None, num_steps: int
) -> dict[str, Any]:
    engine = make_engine(case, settings)
    assert isinstance(engine, EnvPipeEngine) is (settings is not None)
    if settings is not None:
        jobs.follow(engine)
    data = batches(case.model, case.vary)
    losses = [engine.train_batch(data).item() for _ in range(num_steps - 1)]
    evaluated = engine.eval_batch(data).item()
    samples = engine.train_batch_size()
    for batch in (2 * samples, samples):
        engine.set_train_batch_size(batch)
        losses.append(engine.train_batch(data).item())
    held = [buffer for buffers in engine.pipe_buffers.values() for buffer in buffers]
    end_training(engine)
    losses.append(engine.train_batch(data).item())
    digest = hashlib.sha256()
    for _, weight in sorted(engine.module.named_parameters()):
        digest.update(weight.detach().float().numpy().tobytes())
    result = {"losses": losses, "evaluated": evaluated, "weights": digest.hexdigest()}
    if settings is not None:
        session = engine.session
        result |= {
            "units": session.executed,
            "held": sum(buffer is not None for buffer in held),
            "steps": len(session.iterations.latest),
        }
    engine.destroy()
    return result


def train_in_full(jobs: FastJobs, folder: Path, model: str) -> dict[str, Any]:
    """From the profile to the steady phase; what was saved. `WITHOUT` behind the model."""
    settings: dict[str, Any] = {"baseline_steps": 20, "output": str(folder / f"output-{model}")}
    if model.endswith(WITHOUT):
        settings["gpu_control"] = "none"
    case = Case(model.removesuffix(WITHOUT), ())
    engine = make_engine(case, settings)
    jobs.follow(engine)
    data = batches(case.model, vary=False)
    session, steady = engine.session, 0
    while steady < 30:
        engine.train_batch(data)
        steady += session.state.phase is Phase.STEADY
    engine.end_training()
    dist.barrier()  # the first rank has written it
    bill = json.loads(Path(settings["output"], "summary.json").read_text())
    return {**session.summary(), "job": bill["job"]}


def main(folder: Path, num_steps: int, names: Sequence[str], rank: int) -> None:
    os.chdir(folder)
    deepspeed.ops.__compatible_ops__.clear()  # else each machine compiles some first
    deepspeed.init_distributed("gloo")
    jobs = FastJobs(folder)
    if rank == 0:
        for num_stages in sorted({2, dist.get_world_size()}):
            profile = preset_profile("a100-sxm", num_stages, TIMES_S, (1305, 1110))
            profile.write(folder / f"profile-{num_stages}.csv")
        layers_s = {str(n): (4.0, 4.0) if n == 6 else (1.0, 1.0) for n in range(7)}
        write_layers(folder / "layers.json", layers_s)
        request = PlanRequest(MICROBATCHES, schedule="gpipe", policy="uniform")
        make_plan(profile, request).plan.write(folder / "gpipe.json")
    dist.barrier()
    results: dict[str, Any] = {}
    for name in names:
        if name.startswith("loop of "):
            results[name] = train_in_full(jobs, folder, name.removeprefix("loop of "))
            continue
        case = CASES[name]
        results[name] = {"own": train(jobs, case, None, num_steps)}
        for run in case.runs:
            settings = {
                **RUNS[run],
                "baseline_steps": 2,
                "profile": f"{folder}/profile-{case.num_stages}.csv",
            }
            if "plan" in settings:
                settings["plan"] = f"{folder}/{settings['plan']}"
            if settings.get("type") == "baseline":
                del settings["profile"]
            with plans_are_waited_for():
                results[name][run] = train(jobs, case, settings, num_steps)
    (folder / f"rank-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    target, num_ranks, steps, *cases = sys.argv[1:]
    train_all = partial(main, Path(target), int(steps), cases)
    sys.exit(run_forked(int(num_ranks), train_all, Path(target)))
