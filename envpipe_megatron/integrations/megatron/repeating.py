"""Runs one iteration of megatron-core several times from the same state, on the same data.

A forward and a backward change more than gradients: states of random generators, scales of FP8,
counters of a router, sums for the log. All that such an iteration may change is noted before the
first run and put back before each other one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from itertools import tee
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.utils import unwrap_model

from envpipe_megatron.integrations.hooking import replaced

#: Sums that Megatron keeps for its log beside the model, in its versions from 0.16 on: module, name
#: in it. The last are lengths of packed sequences, by which it counts operations.
_SUMS = (
    ("megatron.core.transformer.moe.moe_utils", "_MOE_LAYER_WISE_LOGGING_TRACKER"),
    ("megatron.core.transformer.moe.moe_logging", "_MOE_METRICS_TRACKER"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper"),
    (
        "megatron.core.transformer.experimental_attention_variant.dsa",
        "DSAIndexerLossLoggingHelper",
    ),
    ("megatron.training.training", "_seqlen_stats_in_iteration"),
)
#: Attributes of a module that are not noted: parameters, modules, which are noted by themselves,
#: and FP8 weights, which the first microbatch of each iteration makes again.
_LEFT_OUT = ("_parameters", "_modules", "_fp8_workspaces")
#: Packages of objects that hold state, besides modules.
_WITH_STATE = ("transformer_engine", "megatron.core.transformer.moe.moe_logging")
_PLAIN = (bool, int, float, str, type(None))


class RepeatedIteration:
    """An iteration that has not begun: its gradients are zero, and another one was run before.

    Args:
        chunks: the model, as it is trained.
        data_iterator: as megatron-core's forward-backward functions take it: one, or one a chunk.
        owners: objects whose state its forward step may change, besides the model.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        data_iterator: Any,
        owners: Sequence[object] = (),
    ) -> None:
        self._chunks = chunks
        self._restore = _random_states(), _states(chunks, owners)
        self._several = isinstance(data_iterator, list)
        iterators = data_iterator if self._several else [data_iterator]
        #: Data of each chunk from the first on: copies of it draw what was not drawn so far.
        self._data = [each if each is None else tee(_items(each), 1)[0] for each in iterators]
        self._runs = 0

    def run(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the iteration's data; it runs forwards and backwards.

        Megatron checks losses to run an iteration again by itself: only those of the first run.
        """
        # Forwards may change what they draw.
        iterators = [each if each is None else map(_copy_of, copy(each)) for each in self._data]
        data = iterators if self._several else iterators[0]
        if not self._runs:
            self._runs = 1
            return function(data)
        for restore in self._restore:
            restore()
        for chunk in self._chunks:
            chunk.zero_grad()  # to None
            zero = getattr(chunk, "zero_grad_buffer", None)
            if zero is not None:
                zero()
        with replaced(RerunStateMachine, validate_result=lambda *_, **__: None):
            return function(data)


def _items(source: Iterator[Any]) -> Iterator[Any]:
    """Yield copies of what is left of a source; Megatron's have no other method than `next`.

    A source may fill the same memory with its next item.
    """
    with suppress(StopIteration):
        while True:
            yield _copy_of(next(source))


def _copy_of(item: Any) -> Any:
    """Return a copy of an item, except for what cannot be copied, such as locks."""
    if type(item) in (list, tuple):
        return type(item)(map(_copy_of, item))
    if type(item) is dict:
        return {key: _copy_of(value) for key, value in item.items()}
    if isinstance(item, torch.Generator):
        return item.clone_state()
    if isinstance(item, torch.Tensor):
        return item.clone()
    with suppress(Exception):  # of a class of its own, which forwards may change too
        return deepcopy(item)
    return item


def _random_states() -> Callable[[], None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracked = _copy_of(tracker.get_states())

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        if tracked:
            tracker.set_states(_copy_of(tracked))

    return restore


def _states(chunks: Sequence[torch.nn.Module], owners: Sequence[object]) -> Callable[[], None]:
    """Return what puts back buffers, other tensors, plain values and sums; no parameter."""
    noted = _Noted()
    for chunk in chunks:
        for module in unwrap_model(chunk).modules():
            noted.note_attributes(module)
    for owner in owners:
        noted.note_attributes(owner)
    for name, attribute in _SUMS:
        owner = getattr(sys.modules.get(name), attribute, None)
        noted.note(getattr(owner, "tracker", None) if isinstance(owner, type) else owner)
    return noted.restore


class _Noted:
    """Notes attributes of objects, items of containers, and the contents of tensors among them."""

    def __init__(self) -> None:
        self._attributes: list[tuple[dict[str, Any], str, Any]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._contents: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Kept, so that no other object gets the number of one of them.
        self._seen: dict[int, object] = {}

    def note_attributes(self, owner: object) -> None:
        """Note those of an object whose values are plain, tensors, containers or have state."""
        attributes = getattr(owner, "__dict__", None)
        if not isinstance(attributes, dict) or not self._is_new(owner):  # a class has a proxy
            return
        for name, value in attributes.items():
            if name not in _LEFT_OUT and "hook" not in name and self.note(value):
                self._attributes.append((attributes, name, value))

    def note(self, value: object) -> bool:
        """Note what can change of a value; return whether it is to be put back."""
        if isinstance(value, _PLAIN):
            return True
        if isinstance(value, torch.Tensor):
            # Activations that a module was given, and quantised weights, are no state.
            if type(value) is not torch.Tensor or value.requires_grad:
                return False
            if self._is_new(value):
                self._contents.append((value, value.clone()))
            return True
        if isinstance(value, (dict, list)):
            if self._is_new(value):
                self._containers.append((value, value.copy()))
                for item in value.values() if isinstance(value, dict) else value:
                    self.note(item)
            return True
        of_package = type(value).__module__.startswith(_WITH_STATE)
        if of_package and not isinstance(value, torch.nn.Module):
            self.note_attributes(value)
        return False

    @torch.no_grad()
    def restore(self) -> None:
        """Put all back."""
        for attributes, name, value in self._attributes:
            attributes[name] = value
        for container, held in self._containers:
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(held)
        for tensor, content in self._contents:
            if tensor.shape == content.shape:
                tensor.copy_(content)
            else:  # it was freed, or given another storage
                tensor.data = content.clone()

    def _is_new(self, value: object) -> bool:
        new = id(value) not in self._seen
        self._seen[id(value)] = value
        return new
