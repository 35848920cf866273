"""Runs one iteration of megatron-core several times from the same state, on the same data.

A forward and a backward change more than gradients: states of random generators, scales of FP8,
counters of a router, sums for the log. What such an iteration may change is noted before the first
run and put back before each other one.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.utils import unwrap_model

#: Sums that megatron-core keeps for its log beside the model, in its versions from 0.16 on: module,
#: name in it.
_SUMS = (
    ("megatron.core.parallel_state", "_MOE_LAYER_WISE_LOGGING_TRACKER"),
    ("megatron.core.transformer.moe.moe_logging", "_MOE_METRICS_TRACKER"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper"),
    (
        "megatron.core.transformer.experimental_attention_variant.dsa",
        "DSAIndexerLossLoggingHelper",
    ),
)
#: FP8 weights, which the first microbatch of each iteration makes anew.
_MADE_ANEW = "_fp8_workspaces"
#: Packages of objects that hold state, besides modules.
_WITH_STATE = ("transformer_engine", "megatron.core.transformer.moe.moe_logging")
_PLAIN = (bool, int, float, str, type(None))

Container = MutableMapping[Any, Any] | MutableSequence[Any]


class RepeatedIteration:
    """An iteration that has not begun: its gradients are zero, and another one was run before.

    Args:
        chunks: the model, as it is trained.
        data_iterator: as megatron-core's forward-backward functions take it: one, or one a chunk.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], data_iterator: Any) -> None:
        self._chunks = chunks
        self._restore = [_random_states(), *map(_state_of, chunks), _sums()]
        self._several = isinstance(data_iterator, list)
        iterators = data_iterator if self._several else [data_iterator]
        self._drawn = [each if each is None else _Drawn(each) for each in iterators]
        self._runs = 0

    def run(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the iteration's data; it runs forwards and backwards."""
        if self._runs:
            for restore in self._restore:
                restore()
            for chunk in self._chunks:
                chunk.zero_grad()  # to None
                zero = getattr(chunk, "zero_grad_buffer", None)
                if zero is not None:
                    zero()
        self._runs += 1
        iterators = [each if each is None else iter(each) for each in self._drawn]
        return function(iterators if self._several else iterators[0])


class _Drawn:
    """What was drawn of an iterator so far, and the rest; forwards may change what they draw."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._items: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        place = 0
        while True:
            if place == len(self._items):
                try:
                    self._items.append(next(self._source))
                except StopIteration:
                    return
            yield copy.deepcopy(self._items[place])
            place += 1


def _random_states() -> Callable[[], None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracked = {name: _copied(state) for name, state in tracker.get_states().items()}

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        if tracked:
            tracker.set_states({name: _copied(state) for name, state in tracked.items()})

    return restore


def _copied(state: torch.Tensor | torch.Generator) -> Any:
    return state.clone_state() if isinstance(state, torch.Generator) else state.clone()


def _state_of(chunk: torch.nn.Module) -> Callable[[], None]:
    """Puts back buffers, other tensors and plain values of all modules, but no parameter."""
    noted = _Noted()
    for module in unwrap_model(chunk).modules():
        noted.note(vars(module))
    return noted.restore


def _sums() -> Callable[[], None]:
    noted = _Noted()
    for module, name in _SUMS:
        owner = getattr(sys.modules.get(module), name, None)
        if isinstance(owner, type):
            owner = getattr(owner, "tracker", None)
        if owner is not None:
            noted.note(owner if isinstance(owner, dict) else vars(owner))
    return noted.restore


class _Noted:
    """Values in dictionaries and lists, and the contents of tensors among them."""

    def __init__(self) -> None:
        self._values: list[tuple[Container, Any, Any]] = []
        self._contents: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen: set[int] = set()

    def note(self, container: Container) -> None:
        """Note all that a container holds."""
        if id(container) in self._seen:
            return
        self._seen.add(id(container))
        of_dict = isinstance(container, MutableMapping)
        for key in list(container) if of_dict else range(len(container)):
            value = container[key]
            if key == _MADE_ANEW:
                continue
            if isinstance(value, _PLAIN):
                self._values.append((container, key, value))
            elif type(value) is torch.Tensor and not value.requires_grad:
                self._values.append((container, key, value))
                if id(value) not in self._seen:
                    self._seen.add(id(value))
                    self._contents.append((value, value.detach().clone()))
            elif isinstance(value, (dict, list)):
                self.note(value)
            elif type(value).__module__.startswith(_WITH_STATE) and not isinstance(
                value, torch.nn.Module
            ):
                self.note(getattr(value, "__dict__", {}))

    @torch.no_grad()
    def restore(self) -> None:
        """Put all back."""
        for container, key, value in self._values:
            container[key] = value
        for tensor, content in self._contents:
            tensor.copy_(content)
