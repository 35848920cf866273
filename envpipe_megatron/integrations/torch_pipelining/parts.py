"""Checks that torch's backward in two parts gives a stage the bits that the whole one gives.

torch.distributed.pipelining runs autograd for the gradients of inputs, and again from where weights
meet activations for those of weights. That is not the same where a weight is used more than once
(PyTorch issue 180952), where hooks reduce gradients, or with FSDP, which adds those of weights up
in the type of parameters. It takes as long as two backwards where weights meet activations in a
custom or compiled function (issue 166577), or a checkpoint is computed again. So those are looked
for, and one backward of the job's first step is run both ways, by kernels that are deterministic.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import _backward
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

#: Integers as long as a number, to compare bits by.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def known_reason(stages: Sequence[Any]) -> str:
    """Return why the backwards of these stages stay whole, before any has run; or nothing."""
    for stage in stages:
        for module in stage.submod.modules():
            wrappers = list(_get_registry(module) or ())  # such as fully_shard
            if isinstance(module, FullyShardedDataParallel | DistributedDataParallel):
                wrappers.append(type(module).__name__)
            if wrappers:
                return f"with {wrappers[0]} their parts are not shown to give the same gradients"
        if stage.dw_builder is not None:
            return "a stage has a dw_builder of its own"
        hooks = "_backward_hooks", "_post_accumulate_grad_hooks"
        if any(getattr(p, name, None) for p in stage.submod.parameters() for name in hooks):
            return "parameters have hooks, which the second part may skip"
    return ""


def seen_reason(stage: Any, microbatch: int, loss: torch.Tensor | None) -> str:
    """Return why a stage's backwards stay whole, by one that is about to run; or nothing.

    The backward is run both ways on the side; gradients are left as they were.
    """
    if stage.is_first:
        return ""  # torch runs all of it in the second part
    outputs, inputs = stage.fwd_cache[microbatch]
    gradients = None if stage.is_last else stage._retrieve_recv_grads(microbatch)
    outputs = [loss] if stage.is_last else list(outputs)
    weights = [weight for weight in stage.submod.parameters() if weight.requires_grad]
    try:
        if reason := _reason_of_graph(outputs, inputs, weights):
            return reason
        leaves = [*weights, *(each for each in inputs if isinstance(each, torch.Tensor))]

        def whole() -> list[int | None]:
            with _own_gradients(leaves):
                torch.autograd.backward(outputs, gradients, retain_graph=True)
                return _digests(leaves)

        with _reproducible():
            with _own_gradients(leaves):
                # Of copies: torch detaches the outputs that it is given.
                copies = [output.clone() for output in outputs]
                _, groups = _backward.stage_backward_input(copies, gradients, inputs, iter(weights))
                _backward.stage_backward_weight(iter(weights), groups, retain_graph=True)
                apart = _digests(leaves)
            if (once := whole()) != apart:
                others = "its two parts give" if whole() == once else "each whole one gives"
                return f"{others} other bits"
    except Exception as error:  # also for want of memory: the job's own backward is to come
        return f"torch does not run it in two parts: {type(error).__name__}"
    return ""


@contextlib.contextmanager
def calls_of_modules() -> Iterator[list[str]]:
    """Yield the modules called within: in a backward, those that are computed again."""
    called: list[str] = []
    hook = register_module_forward_pre_hook(lambda of, inputs: called.append(type(of).__name__))
    try:
        yield called
    finally:
        hook.remove()


def _reason_of_graph(outputs: list[Any], inputs: Sequence[Any], weights: list[Any]) -> str:
    def nodes(tensors: Sequence[Any]) -> list[Any]:
        own = [t for t in tensors if isinstance(t, torch.Tensor)]
        return [n for n in map(_backward._get_grad_fn_or_grad_acc, own) if n is not None]

    users = _backward.construct_reverse_graph(nodes(outputs))
    for group in _backward.get_param_groups(nodes(inputs), nodes(weights), users):
        if len(group["intermediates"]) > 1:
            return "a weight is used more than once"
        for node in group["intermediates"]:
            if isinstance(node, BackwardCFunction) or "CppNode" in node.name():
                return f"weights are used by {node.name()}, which torch would run twice"
    return ""


@contextlib.contextmanager
def _reproducible() -> Iterator[None]:
    """Let kernels give the same bits each time, where they can.

    By default some do not, such as the backward of attention, and no two backwards are alike.
    """
    usual = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings(action="ignore"):
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(usual)


@contextlib.contextmanager
def _own_gradients(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let leaves have no gradient meanwhile, and their own again behind it."""
    own = [each.grad for each in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, own, strict=True):
            leaf.grad = gradient


def _digests(leaves: Sequence[torch.Tensor]) -> list[int | None]:
    """Return a sum of each gradient's bits: another copy of all of them may have no memory."""
    found = [None if leaf.grad is None else leaf.grad.detach() for leaf in leaves]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in found]
    sums = [each if each is None else each.view(_BITS[each.element_size()]).sum() for each in local]
    return [each if each is None else int(each) for each in sums]
