"""Backwards in two parts: weight gradients of linear layers are put off to a unit of their own.

A backward of Megatron's computes a linear layer's two gradients in one node of the graph. Within
`first_part`, that node computes the gradient of its input (and of its bias) alone, and what the
weight's needs is kept: input and gradient of the output. `second_part` computes it, and hands it to
the weight as the backward would have: through the graph's own node that accumulates it, with the
hooks that are on it. Whatever is not known here (norms, embeddings, routers, convolutions, layers
of one's own) has its weight gradients in the first part, as always.

Two kinds of layers are known: those of Megatron's own linear function, by a function in its place,
and those of Transformer Engine, by a store in place of theirs, which is what Transformer Engine
itself puts weight gradients off by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers

Gradients = Sequence[torch.Tensor | None]


@dataclass
class PutOff:
    """Gradients that are yet to be computed; None of a result is in `main_grad` already.

    Args:
        parameters: whose they are.
        compute: their gradients, one for each.
    """

    parameters: Sequence[torch.Tensor]
    compute: Callable[[], Gradients]


class _State:
    #: Where gradients go that are put off; None where none are. On GPUs, backwards run in a thread
    #: of their own, so no variable of this thread's will do.
    into: list[PutOff] | None = None
    #: Of the units: what runs beside them stays there (shared experts that Megatron overlaps).
    stream: object = None


def _stream() -> object:
    return torch.cuda.current_stream() if torch.cuda.is_available() else None


def _puts_off() -> bool:
    return _State.into is not None and _stream() == _State.stream


def put_off_in(chunks: Sequence[torch.nn.Module]) -> None:
    """Let backwards of these chunks be split; whole ones, and Megatron's own, stay as they are."""
    if layers.LinearWithGradAccumulationAndAsyncCommunication is _WHOLE:
        layers.LinearWithGradAccumulationAndAsyncCommunication = _Linear
    for chunk in chunks:
        module: Any
        for module in chunk.modules():
            if isinstance(module, (layers.ColumnParallelLinear, layers.RowParallelLinear)):
                for weight in module.parameters(recurse=False):
                    weight.envpipe_split = True  # an embedding's, which it may use, is not
            store = getattr(module, "wgrad_store", None)
            names = _parameter_names(module)
            if store is not None and names and not isinstance(store, _Store):
                module.wgrad_store = _Store(module, names)


@contextmanager
def first_part(into: list[PutOff]) -> Iterator[None]:
    """Within, backwards put weight gradients off, and forwards know that theirs will.

    The latter matters to Transformer Engine, whose forwards hand the store to their backwards.
    """
    before, _State.into, _State.stream = _State.into, into, _stream()
    try:
        yield
    finally:
        _State.into = before


@torch.no_grad()
def second_part(waiting: list[PutOff]) -> None:
    """Compute what was put off, in the order of the backward, and free what it needed.

    A parameter that is used more than once gets the sum, as in a backward.
    """
    left = Counter(id(parameter) for each in waiting for parameter in each.parameters)
    sums: dict[int, torch.Tensor] = {}
    waiting.reverse()
    while waiting:
        each = waiting.pop()
        for parameter, gradient in zip(each.parameters, each.compute(), strict=True):
            key = id(parameter)
            left[key] -= 1
            if gradient is not None:
                sums[key] = sums[key] + gradient if key in sums else gradient
            del gradient
            if not left[key] and key in sums:
                torch.autograd.backward([parameter], [sums.pop(key)])
        del each


_WHOLE = layers.LinearWithGradAccumulationAndAsyncCommunication


class _Linear(_WHOLE):  # type: ignore[misc,valid-type]
    """Megatron's linear function, whose backward can be in two parts."""

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Both gradients, or that of the input alone."""
        puts_off = (
            _puts_off()
            and ctx.grad_output_buffer is None  # Megatron puts it off itself
            and not ctx._fwd_used_autocast
            and getattr(ctx, "gtp_remat_size", 1) == 1  # from 0.19 on: ranks share the weight out
            and getattr(ctx.saved_tensors[1], "envpipe_split", False)
        )
        return (_input_gradient if puts_off else _WHOLE.backward)(ctx, grad_output)


@layers.custom_bwd  # type: ignore[untyped-decorator]  # Megatron's
def _input_gradient(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """As Megatron's backward computes it."""
    inputs, weight = ctx.saved_tensors
    grad_input = grad_output.matmul(weight)
    if ctx.allreduce_dgrad:
        dist.all_reduce(grad_input, group=ctx.tp_group)
    if ctx.sequence_parallel:
        gathered, grad_input = grad_input, torch.empty_like(inputs, requires_grad=False)
        layers.dist_reduce_scatter_func(grad_input, gathered, group=ctx.tp_group)
    grad_bias = None
    if ctx.use_bias:
        grad_bias, _ = layers.prepare_input_tensors_for_wgrad_compute(grad_output, inputs)
        grad_bias = grad_bias.sum(dim=0)
    assert _State.into is not None
    _State.into.append(
        PutOff(
            [weight],
            partial(
                _weight_gradient,
                inputs,
                grad_output,
                weight,
                ctx.main_grad,
                ctx.gradient_accumulation_fusion,
                ctx.tp_group if ctx.sequence_parallel else None,
            ),
        )
    )
    return grad_input, None, grad_bias, *(None for _ in ctx.needs_input_grad[3:])


def _weight_gradient(
    inputs: torch.Tensor,
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    main_grad: torch.Tensor | None,
    fused: bool,
    gathered_over: dist.ProcessGroup | None,
) -> Gradients:
    """As Megatron's backward computes it."""
    if gathered_over is not None:
        shape = [inputs.shape[0] * gathered_over.size(), *inputs.shape[1:]]
        buffer = layers.get_global_memory_buffer().get_tensor(shape, inputs.dtype, "mpu")
        layers.dist_all_gather_func(buffer, inputs, group=gathered_over)
        inputs = buffer
    grad_output, inputs = layers.prepare_input_tensors_for_wgrad_compute(grad_output, inputs)
    if not fused:
        return [grad_output.t().matmul(inputs)]
    assert main_grad is not None
    kernels = layers.fused_weight_gradient_mlp_cuda
    if main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(inputs, grad_output, main_grad)
    else:
        kernels.wgrad_gemm_accum_fp16(inputs, grad_output, main_grad)
    return [None]


class _Store:
    """In place of Transformer Engine's `WeightGradStore` of a module."""

    context = None

    def __init__(self, module: Any, names: tuple[list[str], list[str]]) -> None:
        self._module, (self._weights, self._biases) = module, names

    def delay_wgrad_compute(self) -> bool:
        """Whether a backward, or that of a forward, puts weight gradients off."""
        return _puts_off()

    def put(self, tensors: list[Any], compute: Callable[..., Any]) -> None:
        """Called by a backward of the module's."""
        assert _State.into is not None
        names = [*self._weights, *(self._biases if self._module.use_bias else ())]
        parameters = [getattr(self._module, name) for name in names]
        _State.into.append(PutOff(parameters, partial(self._gradients, tensors, compute)))

    def _gradients(self, tensors: list[Any], compute: Callable[..., Any]) -> Gradients:
        found, biases, *_ = compute(*tensors)
        if len(self._weights) > 1 or isinstance(tensors[-1], list):  # grouped: results are given
            weights, found_biases = list(tensors[-1]), list(biases)
        else:
            weights, found_biases = [found], [biases]
        if self._module.fuse_wgrad_accumulation:
            weights = [None] * len(self._weights)
        known = [b if b is not None and b.numel() else None for b in found_biases]
        gradients = [*weights, *(known if self._module.use_bias else ())]
        names = [*self._weights, *self._biases]
        return [
            None if g is None else g.to(getattr(self._module, name).dtype)
            for name, g in zip(names, gradients, strict=False)
        ]


def _parameter_names(module: Any) -> tuple[list[str], list[str]] | None:
    """Weights and biases of a module of Transformer Engine; None for kinds that are not known."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    overlapped = any(getattr(module, n, False) for n in vars(module) if n.startswith("ub_"))
    if overlapped:
        return None
    if kinds & {"Linear", "LayerNormLinear"}:
        weights = list(getattr(module, "weight_names", ()))
        return (weights, list(module.bias_names)) if len(weights) == 1 else None
    # One that does not add to `main_grad` by itself returns weight gradients that are yet to come.
    if "GroupedLinear" in kinds and module.fuse_wgrad_accumulation and hasattr(module, "weight0"):
        numbers = range(module.num_gemms)
        return [f"weight{n}" for n in numbers], [f"bias{n}" for n in numbers]
    return None
