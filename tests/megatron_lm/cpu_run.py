"""Runs an entry script of a Megatron-LM checkout on the CPU, on gloo.

    torchrun --nproc-per-node 4 tests/megatron_lm/cpu_run.py CHECKOUT/pretrain_gpt.py ARGS...

Megatron-LM takes for granted that there is a GPU. The shims below answer its questions about one
and keep on the CPU what it wants to put there. None changes what is computed: the random numbers of
"the GPU" are the CPU's, with Megatron's own seeds and states, and what cannot be done on a CPU,
like the start of a Triton kernel, is an error. EnvPipe is not imported here, so that what a
checkout imports by itself can be seen.

Arguments that a run needs here are `lm_runs.CPU_ARGS`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import importlib.util
import logging
import multiprocessing.spawn
import os
import runpy
import signal
import site
import subprocess
import sys
import typing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

# Before torch is imported: `torch.compile`, by which Megatron fuses small functions, would run a
# C++ compiler for a minute. The functions then run as they are written.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import typing_extensions
from torch.overrides import TorchFunctionMode


class _CudaOnCpu(TorchFunctionMode):
    """Creates on the CPU what asks for a CUDA device, and keeps it there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(arg) else arg for arg in args)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


class _Stream:
    """A stream of a device that does everything at once: nothing is ever pending on it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


class _DefaultGenerators:
    """The random numbers of "the GPU", whichever number it is asked by, are the CPU's."""

    def __getitem__(self, _: Any) -> torch.Generator:
        return torch.default_generator


def answer_for_cuda() -> None:
    """Shims of `torch.cuda`, to be installed before anything of Megatron is imported.

    `torch.cuda.is_available()` stays false: this is a machine without GPUs.
    """
    cuda: Any = torch.cuda
    # One device a rank; Megatron sets up no process groups where there is none.
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: "cpu"
    cuda.set_device = lambda _: None
    cuda.synchronize = lambda *_: None
    cuda.reset_peak_memory_stats = lambda *_: None
    # Megatron asks whether it is older than Blackwell.
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)

    cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = lambda _: contextlib.nullcontext()

    # The tracker of tensor-parallel random states sets these before dropout and initialization; on
    # the CPU both draw from the default generator.
    cuda.default_generators = _DefaultGenerators()
    # Megatron would warn of the CPU's random numbers at each dropout of each rank.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    cuda._lazy_call = lambda callback, **_: callback()
    cuda.manual_seed = torch.default_generator.manual_seed
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    if hasattr(torch._C, "_cuda_setRNGState"):
        raise RuntimeError("This torch is built for CUDA: cpu_run needs a CPU build.")

    # Optimizer and gradient clipping ask for parameters by the names of these types.
    real_type = torch.Tensor.type
    names = {
        f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")
    }

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real_type(self, *args, **kwargs)
        return names.get(result, result) if isinstance(result, str) else result

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]

    # Experts' tokens: Megatron makes lists of what it copies from a GPU alone.
    real_exchange = torch.distributed.all_to_all_single

    def exchange(*args: Any, **kwargs: Any) -> Any:
        lists = {
            k: v.tolist() if torch.is_tensor(v) else v for k, v in kwargs.items() if "split" in k
        }
        return real_exchange(*args, **{**kwargs, **lists})

    torch.distributed.all_to_all_single = exchange


def name_triton() -> None:
    """Stand in for Triton as `envpipe patch check` does; Megatron-LM imports it unasked."""
    probe = Path(__file__).parents[2] / "envpipe_megatron" / "patching" / "liveness.py"
    runpy.run_path(str(probe))["StandIns"]({"megatron"})


def name_override() -> None:
    """Let Python 3.11 import core_v0.19.0, which takes a decorator of 3.12 from typing."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined,unused-ignore]


def allow_no_cuda() -> None:
    """Pass Megatron's own option for machines without CUDA, which `pretrain` has no way to."""
    from megatron.training import initialize, training

    training.initialize_megatron = partial(initialize.initialize_megatron, allow_no_cuda=True)
    if hasattr(initialize, "fused_kernels"):
        initialize.fused_kernels.load = lambda _: None  # asks nvcc's version, and builds nothing


def let_torch_norm_be_sequence_parallel() -> None:
    """Do what Megatron's fused norms do for sequence parallelism, which need Apex and a GPU.

    They mark their parameters, whose gradients are then summed over the tensor-parallel ranks.
    Megatron refuses torch's norms there, since nobody marks theirs.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def make_and_mark(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        with patch.object(config, "sequence_parallel", False):
            norm = make(cls, config, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = make_and_mark


def attend_as_transformer_engine() -> None:
    """Let Megatron's own attention do two things that it leaves to Transformer Engine's.

    It sees the keys of other context-parallel ranks, of which rank r has chunks r and 2n - 1 - r of
    each sequence, and those rows of the mask; and keys may be wider than values, as latent ones.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    make, attend = DotProductAttention.__init__, DotProductAttention.forward

    def make_anyhow(
        self: Any,
        config: Any,
        *rest: Any,
        k_channels: Any = None,
        v_channels: Any = None,
        **named: Any,
    ) -> None:
        width = v_channels or config.kv_channels
        with patch.multiple(config, context_parallel_size=1, kv_channels=width):
            make(self, config, *rest, **named)

    def whole(part: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        n = group.size()
        if n == 1:
            return part
        chunks = gather_from_sequence_parallel_region(part, group=group).chunk(2 * n)
        return torch.cat([*chunks[::2], *reversed(chunks[1::2])])

    def attend_to_all(
        self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return attend(self, query, whole(key), whole(value), *args, **kwargs)

    multi_latent_attention.HAVE_TE = False  # 0.16 finds its names, which are None
    DotProductAttention.__init__ = make_anyhow
    DotProductAttention.forward = attend_to_all


def keep_what_gloo_still_sends() -> None:
    """Keep a chunk's output while it is sent: a stream orders NCCL's sends, nothing gloo's."""
    from megatron.core.transformer import TransformerConfig

    finish = TransformerConfig.__post_init__

    def finish_and_keep(self: Any) -> None:
        finish(self)
        if self.virtual_pipeline_model_parallel_size is not None:
            self.deallocate_pipeline_outputs = False

    TransformerConfig.__post_init__ = finish_and_keep


def take_built_helpers(checkout: Path) -> None:
    """Take the dataset helpers in C++ from the installed megatron-core, if built from this source.

    Megatron-LM would build them inside the checkout, with make, a C++ compiler and pybind11.
    """
    folder = Path("megatron", "core", "datasets")
    for root in site.getsitepackages() + sys.path:
        installed = Path(root) / folder
        built = list(installed.glob("helpers_cpp*.so"))
        source = "helpers.cpp"
        if (
            not built
            or (installed / source).read_bytes() != (checkout / folder / source).read_bytes()
        ):
            continue
        name = "megatron.core.datasets.helpers_cpp"
        spec = importlib.util.spec_from_file_location(name, built[0])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        import megatron.core.datasets.utils

        megatron.core.datasets.utils.compile_helpers = lambda: None
        return


def spawn_without_the_script() -> None:
    """Keep spawned processes from importing the entry script again, where these shims are not.

    Saving a checkpoint starts one such process, which needs nothing of it.
    """
    prepare = multiprocessing.spawn.get_preparation_data

    def prepare_without(name: str) -> dict[str, Any]:
        data = prepare(name)
        data.pop("init_main_from_path", None)
        return data

    multiprocessing.spawn.get_preparation_data = prepare_without


def wait_for_plans() -> None:
    """Wait for what plans beside training: its plan comes at one step however busy the host is."""
    start = subprocess.Popen.__init__

    def start_and_wait(self: Any, words: Any, *args: Any, **kwargs: Any) -> None:
        start(self, words, *args, **kwargs)
        if "envpipe_megatron.tuning.background" in words:
            self.wait()

    subprocess.Popen.__init__ = start_and_wait  # type: ignore[method-assign]


def remember_model(training: Any) -> list[torch.nn.Module]:
    """The chunks of this rank's model, or its engine, once Megatron's module has built them."""
    set_up = training.setup_model_and_optimizer
    chunks: list[torch.nn.Module] = []

    def set_up_and_remember(*args: Any, **kwargs: Any) -> Any:
        result = set_up(*args, **kwargs)
        chunks.extend(result[0])
        return result

    training.setup_model_and_optimizer = set_up_and_remember
    return chunks


def tell(chunks: list[torch.nn.Module]) -> None:
    """Print a digest of all weights, and whether anything of EnvPipe was imported."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
    if chunks:
        print(f"\ncpu_run: weights {digest.hexdigest()}")
    print(f"\ncpu_run: envpipe {'imported' if 'envpipe_megatron' in sys.modules else 'absent'}")


def main() -> None:
    """Run the script named first, with the arguments after it, as torchrun would."""
    script = Path(sys.argv[1]).resolve()
    checkout = next(folder for folder in script.parents if (folder / "megatron").is_dir())
    # The checkout's own megatron.core goes before an installed megatron-core.
    sys.path[0] = str(checkout)
    sys.argv = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads
    torch.set_num_threads(1)
    answer_for_cuda()
    name_triton()
    name_override()
    with _CudaOnCpu():
        allow_no_cuda()
        let_torch_norm_be_sequence_parallel()
        attend_as_transformer_engine()
        keep_what_gloo_still_sends()
        take_built_helpers(checkout)
        spawn_without_the_script()
        wait_for_plans()
        from megatron.training import training

        chunks = remember_model(training)
        runpy.run_path(str(script), run_name="__main__")
        tell(chunks)
    # Process groups that the interpreter's end meets alive abort one rank in some twenty runs.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
