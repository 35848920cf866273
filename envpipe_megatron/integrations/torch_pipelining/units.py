"""Reports the units that torch.distributed.pipelining runs, and watches what they do.

Torch's backward in two parts has to give a stage the bits that the whole one gives.
torch.distributed.pipelining runs autograd for the gradients of inputs, and again from where weights
meet activations for those of weights. That is not the same where a weight is used more than once
(PyTorch issue 180952), where hooks reduce gradients, or with FSDP, which adds those of weights up
in the type of parameters. It takes as long as two backwards where weights meet activations in a
custom or compiled function (issue 166577), or a checkpoint is computed again. So those are looked
for, and one backward of the job's first step is run both ways.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.function import BackwardCFunction
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import _backward
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.integrations.framework_units import Reporter, SeenUnit
from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.integrations.outcome import Outcome

_ORDINARY = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"
#: What a backward is given, in its order; names of the number of a microbatch.
_ARGUMENTS = "bwd_chunk_id", "loss", "full_backward"
_CHUNK_IDS = "bwd_chunk_id", "fwd_chunk_id"
#: Kinds of the units whose arguments do not matter.
_KINDS = {_ORDINARY[0]: (Kind.FORWARD,), _ORDINARY[2]: (Kind.WEIGHT_GRADIENT,)}
#: How often a backward is tried both ways: kernels may repeat themselves by chance.
_TRIES = 4
NOT_TRIED = "none was tried in two parts"


#: State that units may change beside their outputs and gradients, and the effect of another order.
BUFFERS_BY_BACKWARDS = "buffers that backwards change"
DRAWN_BY_BACKWARDS = "random numbers in backwards"
DRAWN_BY_FORWARDS = "random numbers on ranks of several stages"
EFFECTS = {
    BUFFERS_BY_BACKWARDS: "another order gives them other values",
    DRAWN_BY_BACKWARDS: "another order gives units other numbers",
    # Each stage's forwards keep their order in any order of units; a rank's do not.
    DRAWN_BY_FORWARDS: "another order gives forwards other numbers",
}


class Units:
    """Reports the units of this rank's stages to `reporter`, while there is one.

    On the last stage a forward ends after its loss, which the schedule computes.

    Args:
        stages: of this rank, in the order of their chunks.
        agree: returns a reason that a rank of this stage has against a trial, on all of them, or
            nothing. They may send each other parts of tensors within backwards.
        split: whether the order lists whole backwards as two parts that run as one.
    """

    def __init__(self, stages: Iterable[Any], agree: Callable[[str], str], *, split: bool) -> None:
        self.reporter: Reporter | None = None
        #: State that units were seen to change; None while they are not watched.
        self.seen: set[str] | None = None
        self.split = split
        #: By chunk, why its backwards stay whole, if they do; None if that is not looked for.
        self.why_whole: dict[int, str] | None = None
        #: Chunks of which a backward has run, and what was seen that is against a trial of parts.
        self._ran, self._against = set[int](), dict[int | None, str]()
        self._agree = agree
        #: The chunk of the forward that ends after its loss.
        self._awaits_loss: int | None = None
        self._reporting: list[Any] = []
        self._replaced = contextlib.ExitStack()
        for chunk, stage in enumerate(stages):
            for name in _ORDINARY:
                self.replace(stage, name, self._around(stage, chunk, name))

    def release(self) -> None:
        """Give stages and schedules their own functions back."""
        self.reporter = None
        self._replaced.close()

    def forget(self) -> None:
        """Report nothing of the rest of a step, which has failed."""
        self.reporter, self._awaits_loss = None, None

    def report_losses_of(self, schedule: Any) -> None:
        """Have a schedule of these stages report when it has computed a loss."""
        if any(schedule is each for each in self._reporting):
            return
        self._reporting.append(schedule)
        compute = schedule._maybe_compute_loss

        def maybe_compute_loss(*args: Any, **kwargs: Any) -> Any:
            with self._hooks_seen(self._awaits_loss):
                result = compute(*args, **kwargs)
            if self._awaits_loss is not None:
                self._awaits_loss = None
                self._end()
            return result

        self.replace(schedule, "_maybe_compute_loss", maybe_compute_loss)

    def replace(self, of: Any, name: str, function: Callable[..., Any]) -> None:
        """Give an object another function, until `release`."""
        self._replaced.enter_context(replaced(of, **{name: function}))

    def _around(self, stage: Any, chunk: int, name: str) -> Callable[..., Any]:
        own = getattr(stage, name)
        forward = name == _ORDINARY[0]

        def unit(*args: Any, **kwargs: Any) -> Any:
            if self.reporter is None:
                return own(*args, **kwargs)
            given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
            # A schedule of the user's may name it, and a stage of the user's may know it.
            microbatch = next((given[each] for each in _CHUNK_IDS if each in given), None)
            microbatch = microbatch if isinstance(microbatch, int) else None
            kinds = _KINDS.get(name) or self._backward(whole=given.get("full_backward", True))
            for kind in kinds[:-1]:
                self.reporter.begin(SeenUnit(kind, microbatch, chunk, combined=True))
                self.reporter.end()
            self.reporter.begin(SeenUnit(kinds[-1], microbatch, chunk))
            if self.seen is None:
                result = own(*args, **kwargs)
            else:
                if name == _ORDINARY[1] and self.why_whole is not None:
                    self._look_at_parts(stage, chunk, microbatch, given.get("loss"))
                run = partial(own, *args, **kwargs)
                result = self._watched(stage, chunk, run, forward=forward)
            if forward and stage.is_last:
                self._awaits_loss = chunk
            else:
                self._end()
            return result

        return unit

    def _watched(self, stage: Any, chunk: int, run: Callable[[], Any], *, forward: bool) -> Any:
        """Run a unit, and look at what it changes beside its outputs and gradients."""
        assert self.seen is not None
        before, versions = _random_states(stage.device), _versions(stage)
        with self._hooks_seen(chunk) if forward else calls_of_modules() as called:
            result = run()
        if before != _random_states(stage.device):
            self.seen.add(DRAWN_BY_FORWARDS if forward else DRAWN_BY_BACKWARDS)
        if not forward and versions != _versions(stage):
            self.seen.add(BUFFERS_BY_BACKWARDS)
        if called:
            self._against[chunk] = f"torch would compute {called[0]} again for each of its weights"
        return result

    @contextlib.contextmanager
    def _hooks_seen(self, chunk: int | None) -> Iterator[None]:
        """Notice hooks that a chunk's forward, or its loss, sets within."""
        before = RemovableHandle.next_id
        yield
        if before != RemovableHandle.next_id:
            self._against[chunk] = "hooks of a backward, which a trial would call, too"

    def _look_at_parts(self, stage: Any, chunk: int, microbatch: int | None, loss: Any) -> None:
        """Find out why a chunk's backwards stay whole: the first backward shows what they do."""
        assert self.seen is not None
        assert self.why_whole is not None
        if self.why_whole[chunk] is NOT_TRIED and chunk in self._ran:
            own = self._against.get(chunk) or max(self.seen - {DRAWN_BY_FORWARDS}, default="")
            self.why_whole[chunk] = seen_reason(
                stage, microbatch, loss, lambda why: self._agree(own or why)
            )
        self._ran.add(chunk)

    def _backward(self, *, whole: bool) -> tuple[Kind, ...]:
        """Return the units of torch's backward, which run as one."""
        if not whole:
            return (Kind.INPUT_GRADIENT,)
        return (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT) if self.split else (Kind.BACKWARD,)

    def _end(self) -> None:
        if self.reporter is not None:
            self.reporter.end()


def _random_states(device: torch.device) -> tuple[object, ...]:
    """Return the states of all generators that a unit may use; a GPU is not waited for."""
    tensors = [torch.get_rng_state()]
    if torch.device(device).type == "cuda":
        tensors.append(torch.cuda.get_rng_state(device))
    numpys: Any = np.random.get_state()
    _, key, *rest = numpys
    arrays = [key, *(state.numpy() for state in tensors)]
    return (random.getstate(), *rest, *(array.tobytes() for array in arrays))


def _versions(stage: Any) -> list[int]:
    """Return counts of writes in place, as a recomputed forward of a BatchNorm makes them."""
    return [each._version for each in stage.submod.buffers() if not each.is_inference()]


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


def seen_reason(
    stage: Any, microbatch: int | None, loss: torch.Tensor | None, agree: Callable[[str], str]
) -> str:
    """Return why a stage's backwards stay whole, by one that is about to run; or nothing.

    The backward is run both ways on the side; gradients are left as they were. `agree` is as for
    `Units`: a rank that fails within would leave its peers waiting, so all have room, or none runs.
    """
    if stage.is_first:
        return ""  # torch runs all of it in the second part
    try:
        outputs, inputs = stage.fwd_cache[microbatch]
        gradients = None if stage.is_last else stage._retrieve_recv_grads(microbatch)
        outputs = [loss] if stage.is_last else list(outputs)
        named = stage.submod.named_parameters()
        leaves = {name: each for name, each in named if each.requires_grad}
        weights = list(leaves.values())
        against = _reason_of_graph(outputs, inputs, weights)
    except Exception as error:
        against = f"torch does not run it in two parts: {type(error).__name__}"
    if against := agree(against):
        return against
    leaves |= {
        f"input {at}": each for at, each in enumerate(inputs) if isinstance(each, torch.Tensor)
    }
    shares = set[bool]()

    def outcome() -> Outcome:
        given = {name: each.grad for name, each in leaves.items() if each.grad is not None}
        return Outcome.of({name: _local(gradient) for name, gradient in given.items()})

    def whole() -> Outcome:
        ends = [at for at, output in enumerate(outputs) if output.requires_grad]
        given = None if gradients is None else [gradients[at] for at in ends]
        with _own_gradients(leaves.values()):
            torch.autograd.backward([outputs[at] for at in ends], given, retain_graph=True)
            return outcome()

    def apart() -> Outcome:
        with _own_gradients(leaves.values()):
            # Of copies: torch detaches the outputs that it is given.
            copies = [output.clone() for output in outputs]
            _, groups = _backward.stage_backward_input(copies, gradients, inputs, iter(weights))
            _backward.stage_backward_weight(iter(weights), groups, retain_graph=True)
            found = [*(gradients or ()), *(each.grad for each in leaves.values())]
            shares.add(_share_memory(found, [each.grad for each in weights]))
            return outcome()

    try:
        against = _apart_reason(apart, whole)
    except Exception as error:  # alike on all ranks; the job's own backward is to come
        return f"torch does not run it in two parts: {type(error).__name__}"
    return "a weight's gradient has the memory of another gradient" if any(shares) else against


def _apart_reason(apart: Callable[[], Outcome], whole: Callable[[], Outcome]) -> str:
    """Return how gradients of a backward in two parts differ from those of a whole one, if they do.

    Kernels such as those of attention add in any order, more or less often. So once equal is
    enough, and where runs of a kind differ from each other, others may by as much.
    """
    # As often on each rank: those of one stage may send each other parts of tensors within.
    pairs = [(whole(), apart()) for _ in range(_TRIES)]
    if not all(differing := [one.differs_from(other) for one, other in pairs]):
        return ""
    both = list(zip(*pairs, strict=True))
    for runs, others in (both, both[::-1]):
        if again := next(filter(runs[0].differs_from, runs), None):
            return runs[0].strays_from(others[0], again) or ""
    return f"its two parts give other bits: {differing[0]}"


@contextlib.contextmanager
def calls_of_modules() -> Iterator[list[str]]:
    """Yield the modules called within: in a backward, those that are computed again."""
    called: list[str] = []
    hook = register_module_forward_pre_hook(lambda of, inputs: called.append(type(of).__name__))
    try:
        yield called
    finally:
        hook.remove()


def _free_bytes(device: torch.device) -> float:
    """Return what the driver has left: for more, torch would wait for all of the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


def _reason_of_graph(
    outputs: Sequence[torch.Tensor], inputs: Sequence[Any], weights: Sequence[torch.Tensor]
) -> str:
    """Return what is against trying a backward in two parts, by its graph and memory; or nothing.

    A trial takes memory for gradients of weights, inputs and outputs, and of what weights meet.
    """

    def nodes(tensors: Sequence[Any]) -> list[Any]:
        own = [t for t in tensors if isinstance(t, torch.Tensor)]
        return [n for n in map(_backward._get_grad_fn_or_grad_acc, own) if n is not None]

    if any(output._is_view() for output in outputs):
        return "an output is a view, which torch cannot detach in place"
    users = _backward.construct_reverse_graph(nodes(outputs))
    met: list[Any] = []
    for group in _backward.get_param_groups(nodes(inputs), nodes(weights), users):
        if len(group["intermediates"]) > 1:
            return "a weight is used more than once"
        for node in group["intermediates"]:
            if isinstance(node, BackwardCFunction) or "CppNode" in node.name():
                return f"weights are used by {node.name()}, which torch would run twice"
            met += node._input_metadata
    held = [each for each in (*outputs, *inputs) if isinstance(each, torch.Tensor)]
    room_bytes = sum(2 * _local(each).nbytes for each in weights) + sum(
        math.prod(each.shape) * each.dtype.itemsize for each in (*held, *met)
    )
    if room_bytes > _free_bytes(outputs[0].device):
        return "memory has no room to try it in two parts"
    # Kept by the allocator: memory that a rank lacked in the middle would part it from its peers.
    torch.empty(room_bytes, dtype=torch.uint8, device=outputs[0].device)
    return ""


@contextlib.contextmanager
def _own_gradients(leaves: Collection[torch.Tensor]) -> Iterator[None]:
    """Let leaves have no gradient meanwhile, and their own again after it."""
    own = [each.grad for each in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, own, strict=True):
            leaf.grad = gradient


def _share_memory(found: Sequence[torch.Tensor | None], of: Sequence[torch.Tensor | None]) -> bool:
    """Return whether one of these gradients lies where another that was found does.

    The next microbatch's would be added to both: torch keeps gradients of weights as it gets them.
    """
    found_at, at = (
        [_local(each).untyped_storage().data_ptr() for each in several if each is not None]
        for several in (found, of)
    )
    places = Counter(found_at)
    return any(places[place] > 1 for place in at if place)  # an empty one has none


def _local(gradient: torch.Tensor) -> torch.Tensor:
    own = gradient.detach()
    return own.to_local() if isinstance(own, DTensor) else own
