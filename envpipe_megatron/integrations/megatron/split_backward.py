"""Splits backwards: weight gradients of linear layers are computed by a unit of their own.

Megatron computes both gradients of a linear layer in one node of autograd's graph. Within
`first_part`, that node computes its input's and its bias's only, and keeps what its weight's needs:
its input and the gradient of its output. `second_part` computes it, and autograd accumulates it as
in a whole backward, hooks included. Other layers (norms, embeddings, routers,
convolutions, those of other packages) have their weight gradients in the first part, as always.

Two kinds of layers are known: those of Megatron's own linear function, by a function in its place,
and Transformer Engine's, by a store in place of the one that they put weight gradients off with.

`put_off_in` is called once for a model, `why_whole` where a job decides what orders it plans, and
the two parts by `MegatronWork`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from megatron.core.utils import get_model_config

from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.integrations.megatron.limits import keeps_whole

Gradients = Sequence[torch.Tensor | None]


@dataclass
class PutOff:
    """Gradients that are yet to be computed.

    Args:
        parameters: the ones that they are of.
        compute: returns them, one for each; None for one that it added to `main_grad` itself.
    """

    parameters: Sequence[torch.Tensor]
    compute: Callable[[], Gradients]


class _Under:
    """The first part under way. On GPUs, autograd runs backwards in threads of its own.

    So this is neither a variable of a context nor of a thread.
    """

    #: Where it puts gradients off to; None outside of first parts.
    into: list[PutOff] | None = None
    #: The stream of units. Layers that run beside it (shared experts that Megatron overlaps with
    #: messages) stay whole: nothing would let a second part wait for them.
    stream: object = None


def _stream() -> object:
    return torch.cuda.current_stream() if torch.cuda.is_available() else None


def _puts_off() -> bool:
    return _Under.into is not None and _stream() == _Under.stream


def first_part(into: list[PutOff]) -> AbstractContextManager[None]:
    """Within, backwards put weight gradients off to a list.

    The forward of such a backward is run within, too: Transformer Engine's layers look there
    whether the backward will.
    """
    return replaced(_Under, into=into, stream=_stream())


def second_part(waiting: list[PutOff]) -> None:
    """Compute what was put off, first what came first, and empty the list.

    Each is a node of a graph that autograd runs: so a weight that is used more than once gets its
    gradients' sum, and hooks run, as in a whole backward.
    """
    # Of nodes that can run, autograd takes the latest first.
    node: Any = _Node
    ends = [node.apply(each.compute, *each.parameters) for each in reversed(waiting)]
    waiting.clear()
    if ends:  # a stage may have no layer that puts any off
        torch.autograd.backward(ends, [end.detach() for end in ends])


class _Node(torch.autograd.Function):
    """A node whose backward computes gradients that were put off."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], Gradients], *parameters: torch.Tensor
    ) -> torch.Tensor:
        """Return an end for the graph to begin at, which holds nothing."""
        ctx.compute = compute
        return torch.empty(0, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        """Return the gradients, and free what they needed."""
        compute, ctx.compute = ctx.compute, None
        return None, *compute()


def put_off_in(chunks: Sequence[torch.nn.Module]) -> None:
    """Let backwards of a model be in two parts; whole ones stay as they are."""
    if layers.LinearWithGradAccumulationAndAsyncCommunication is _WHOLE:
        layers.LinearWithGradAccumulationAndAsyncCommunication = _Linear
    for module in _modules(chunks):
        names = _known_weights(module)
        if names and (store := getattr(module, "wgrad_store", None)) is not None:
            if not isinstance(store, _Store):
                module.wgrad_store = _Store(module, names)
        else:
            for name in names:
                getattr(module, name).envpipe_puts_off = True


def why_whole(chunks: Sequence[torch.nn.Module], config: Any) -> str | None:
    """Say why backwards of this stage stay whole; None if they can be split.

    Args:
        chunks: the model of this stage, in Megatron's wrappers.
        config: its TransformerConfig.
    """
    against = keeps_whole(config) + [name for name in map(_kind, chunks) if "FullySharded" in name]
    if against:
        return f"weight gradients cannot be put off with {against[0]}"
    known, unknown = 0, Counter[str]()
    for module in _modules(chunks):
        names = _known_weights(module)
        for name, weight in module.named_parameters(recurse=False):
            if not weight.requires_grad:
                continue
            if name in names:
                known += weight.numel()
            elif weight.dim() > 1 and "Embedding" not in _kind(module):
                unknown[_kind(module)] += weight.numel()
    if known >= unknown.total():
        return None
    large = ", ".join(kind for kind, _ in unknown.most_common(3))
    return f"most weights are of layers that cannot put theirs off ({large})"


def waiting_bytes(arguments: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the most bytes that wait between both parts of a backward, by chunk.

    That is input and output gradient of each linear layer, by the shapes of weights. The arguments
    are those of megatron-core's forward-backward function.
    """
    model = arguments["model"]
    chunks = model if isinstance(model, list) else [model]
    config = get_model_config(chunks[0])
    tokens = arguments["seq_length"] * arguments["micro_batch_size"] / config.context_parallel_size
    # Tokens of all experts' ranks come to those of this one.
    experts = config.num_moe_experts or 1
    share = config.moe_router_topk * config.expert_model_parallel_size / experts
    return tuple(
        tokens
        * sum(
            sum(each.shape) * each.element_size() * (share if ".experts." in name else 1)
            for name, each in chunk.named_parameters()
            if each.dim() == 2 and "embedding" not in name
        )
        for chunk in chunks
    )


def _kind(module: torch.nn.Module) -> str:
    return type(module).__name__


def _modules(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.modules()


def _known_weights(module: Any) -> list[str]:
    """Return the names of weights whose gradients can be put off, in the order they come in."""
    if isinstance(module, (layers.ColumnParallelLinear, layers.RowParallelLinear)):
        return ["weight"] * (module.weight is not None and _knows_function())
    uses_userbuffers = any(on is True for name, on in vars(module).items() if name[:3] == "ub_")
    if getattr(module, "wgrad_store", None) is None or uses_userbuffers:
        return []
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if kinds & {"Linear", "LayerNormLinear"} and len(module.weight_names) == 1:
        return list(module.weight_names)
    if "LayerNormMLP" in kinds and not module.use_bias:  # its bias may not come with its weight
        return ["fc2_weight", "fc1_weight"]
    # Where it does not add to `main_grad` itself, its backward returns what is yet to be computed.
    fused = getattr(module, "fuse_wgrad_accumulation", False)
    if "GroupedLinear" in kinds and fused and hasattr(module, "weight0"):
        return [f"weight{number}" for number in range(module.num_gemms)]
    return []


_WHOLE = layers.LinearWithGradAccumulationAndAsyncCommunication
#: What a forward of it has had in any version; one with more may do more in its backward.
_ARGUMENTS = {
    *("ctx", "input", "weight", "bias", "gradient_accumulation_fusion", "allreduce_dgrad"),
    *("sequence_parallel", "grad_output_buffer", "wgrad_deferral_limit", "tp_group"),
    *("gtp_remat_size", "output_dtype"),
}


def _knows_function() -> bool:
    return inspect.signature(_WHOLE.forward).parameters.keys() <= _ARGUMENTS


class _Linear(_WHOLE):  # type: ignore[misc,valid-type]
    """Megatron's linear function, whose backward can be in two parts."""

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Return both gradients, or the weight's as None."""
        puts_off = (
            _puts_off()
            and ctx.grad_output_buffer is None  # else Megatron may put it off itself
            and not ctx._fwd_used_autocast
            and getattr(ctx, "gtp_remat_size", 1) == 1
            # A weight of another layer (a tied embedding's) may have gradients besides this one,
            # and Megatron adds their sum.
            and getattr(ctx.saved_tensors[1], "envpipe_puts_off", False)
        )
        return (_input_gradient if puts_off else _WHOLE.backward)(ctx, grad_output)


@layers.custom_bwd  # type: ignore[untyped-decorator]  # Megatron's
def _input_gradient(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return Megatron's gradients but the weight's, which it would compute beside messages."""
    inputs, weight = ctx.saved_tensors
    grad_output = grad_output.to(inputs.dtype)
    grad_input = grad_output.matmul(weight)
    if ctx.allreduce_dgrad:
        dist.all_reduce(grad_input, group=ctx.tp_group)
    gathered_over = None
    if ctx.sequence_parallel:
        gathered_over, gathered = ctx.tp_group, grad_input
        grad_input = torch.empty_like(inputs, requires_grad=False)
        layers.dist_reduce_scatter_func(grad_input, gathered, group=ctx.tp_group)
    grad_output, inputs = layers.prepare_input_tensors_for_wgrad_compute(grad_output, inputs)
    main_grad = ctx.main_grad if ctx.gradient_accumulation_fusion else None
    compute = partial(_weight_gradient, inputs, grad_output, main_grad, gathered_over)
    assert _Under.into is not None
    _Under.into.append(PutOff([weight], compute))
    grad_bias = grad_output.sum(dim=0) if ctx.use_bias else None
    return grad_input, None, grad_bias, *[None] * (len(ctx.needs_input_grad) - 3)


def _weight_gradient(
    inputs: torch.Tensor,
    grad_output: torch.Tensor,
    main_grad: torch.Tensor | None,
    gathered_over: dist.ProcessGroup | None,
) -> Gradients:
    """Compute the weight gradient as Megatron's backward does.

    Args:
        inputs: [tokens, inputs], of sequence parallelism this rank's tokens.
        grad_output: [tokens, outputs].
        main_grad: what it is added to; None to return it.
        gathered_over: the ranks whose tokens the inputs are to be gathered of, if any.
    """
    if gathered_over is not None:
        shape = [len(grad_output), inputs.shape[1]]
        gathered = layers.get_global_memory_buffer().get_tensor(shape, inputs.dtype, "mpu")
        layers.dist_all_gather_func(gathered, inputs, group=gathered_over)
        inputs = gathered
    if main_grad is None:
        return [grad_output.t().matmul(inputs)]
    kernels = layers.fused_weight_gradient_mlp_cuda
    if main_grad.dtype == torch.float32:
        kernels.wgrad_gemm_accum_fp32(inputs, grad_output, main_grad)
    else:
        kernels.wgrad_gemm_accum_fp16(inputs, grad_output, main_grad)
    return [None]


class _Store:
    """Takes the place of the `WeightGradStore` of one of Transformer Engine's layers."""

    context = None

    def __init__(self, module: Any, weights: list[str]) -> None:
        self._module = module
        self._weights = weights

    def delay_wgrad_compute(self) -> bool:
        """Return whether the layer's backward, or that of its forward, is to call `put`."""
        return _puts_off()

    def put(self, tensors: list[Any], compute: Callable[..., Any]) -> None:
        """Put off a computation of the layer, which gets these tensors."""
        into, module = _Under.into, self._module
        assert into is not None
        weights = [name for name in self._weights if getattr(module, name).requires_grad]
        if not _grouped(tensors):  # of a layer with two weights, the second comes right after
            first = getattr(module, weights[0])
            place = int(len(weights) > 1 and bool(into) and into[-1].parameters[0] is first)
            weights = weights[place : place + 1]
        biases = [name.replace("weight", "bias") for name in weights if module.use_bias]
        compute = partial(self._gradients, len(weights), len(biases), tensors, compute)
        into.append(PutOff([getattr(module, name) for name in (*weights, *biases)], compute))

    def _gradients(
        self, weights: int, biases: int, tensors: list[Any], compute: Callable[..., Any]
    ) -> Gradients:
        weight, found, *_ = compute(*tensors)
        of_weights = [None if self._module.fuse_wgrad_accumulation else weight] * weights
        of_biases = found if _grouped(tensors) else [found]
        # A bias whose gradient came in the first part has none here, or an empty one.
        of_biases = [each if each is not None and each.numel() else None for each in of_biases]
        return [*of_weights, *of_biases[:biases]]


def _grouped(tensors: list[Any]) -> bool:
    """Return whether they are a grouped layer's: inputs, output gradients, where to add results."""
    return len(tensors) == 3
