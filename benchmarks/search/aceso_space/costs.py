"""What any run of pieces takes and holds as a stage, by Aceso's formula (EuroSys'24).

A stage takes its forwards and backwards, what it computes again, and one message at each end. It
holds all its parameters' bytes; for each microbatch in flight its input and what is not computed
again of its activations; the most that one recomputation holds; and workspace: the largest of any
forward and of any backward (the last piece's left out, as Aceso does), or the least workspace of
its parameters if that is more.

`StageCosts` answers for arrays of stages at once, from sums over all pieces before a cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.search.aceso_space.recomputation import Recomputed, StageRecompute
from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.search.layer_profile import LayerProfile, Sizes


@dataclass(frozen=True)
class Held:
    """What pieces hold: arrays, of a microbatch where it is activations."""

    parameters: FloatArray
    activation_bytes: FloatArray
    forward_bytes: FloatArray
    backward_bytes: FloatArray

    def with_other(self, other: Held) -> Held:
        """What they hold together with others of the same stage."""
        return Held(
            self.parameters + other.parameters,
            self.activation_bytes + other.activation_bytes,
            np.maximum(self.forward_bytes, other.forward_bytes),
            np.maximum(self.backward_bytes, other.backward_bytes),
        )


class StageCosts:
    """Costs of stages at some sizes: one GPU, one microbatch.

    Args:
        memory_bytes: that a GPU may hold.

    Attributes:
        piece_s: [num_pieces] forward and backward of each piece.
    """

    def __init__(self, profile: LayerProfile, sizes: Sizes, memory_bytes: float) -> None:
        self._memory_bytes = memory_bytes
        each = profile.bytes_per_parameter
        self._parameter_bytes = each.weight + each.gradient + each.optimizer
        self._least_workspace = each.least_workspace
        forward_s = profile.column(sizes, "forward_s")[:, 0]
        self.piece_s = forward_s + profile.column(sizes, "backward_s")[:, 0]
        self._run_s = _sums(self.piece_s)
        self._parameters = _sums(profile.column(sizes, "parameters"))
        self._activations = _sums(profile.column(sizes, "activation_bytes"))
        self._input_bytes = np.append(profile.column(sizes, "input_bytes"), 0.0)
        output_bytes = np.insert(profile.column(sizes, "output_bytes"), 0, 0.0)
        links = profile.links
        self._receive_s = [links.message_s(self._input_bytes, across) for across in (False, True)]
        self._send_s = [links.message_s(output_bytes, across) for across in (False, True)]
        self._forward_workspace = _RangeMaximum(profile.column(sizes, "forward_workspace_bytes"))
        self._backward_workspace = _RangeMaximum(profile.column(sizes, "backward_workspace_bytes"))
        self._again = StageRecompute(profile, sizes)

    def compute_s(self, first: IntArray, end: IntArray) -> FloatArray:
        """Time of forwards and backwards."""
        compute_s: FloatArray = self._run_s[end] - self._run_s[first]
        return compute_s

    def receive_s(self, first: IntArray, crosses: bool) -> FloatArray:
        """Time of the message before a stage."""
        return self._receive_s[crosses][first]

    def send_s(self, end: IntArray, crosses: bool) -> FloatArray:
        """Time of the message behind a stage."""
        return self._send_s[crosses][end]

    def run_s(self, first: IntArray, end: IntArray, crosses: tuple[bool, bool]) -> FloatArray:
        """Time with messages and without recomputation."""
        messages_s = self.receive_s(first, crosses[0]) + self.send_s(end, crosses[1])
        return self.compute_s(first, end) + messages_s

    def input_bytes(self, first: IntArray) -> FloatArray:
        """What a stage keeps of its input."""
        return self._input_bytes[first]

    def held(self, first: IntArray, end: IntArray, workspace_end: IntArray) -> Held:
        """What pieces hold without recomputation; workspace of some of them."""
        return Held(
            self._parameters[end] - self._parameters[first],
            self._activations[end] - self._activations[first],
            self._forward_workspace(first, workspace_end),
            self._backward_workspace(first, workspace_end),
        )

    def over_of(self, held: Held, in_flight: int) -> FloatArray:
        """How much more than the memory is held, without an input."""
        workspace = held.forward_bytes + held.backward_bytes
        over_bytes: FloatArray = (
            self._parameter_bytes * held.parameters
            + in_flight * held.activation_bytes
            + np.maximum(workspace, self._least_workspace * held.parameters)
            - self._memory_bytes
        )
        return over_bytes

    def over_bytes(self, first: IntArray, end: IntArray, in_flight: int) -> FloatArray:
        """How much more than the memory is held without recomputation."""
        held = self.held(first, end, end - 1)
        return self.over_of(held, in_flight) + in_flight * self.input_bytes(first)

    def recompute_bound_s(
        self, first: IntArray, end: IntArray, over_bytes: FloatArray, in_flight: IntArray
    ) -> FloatArray:
        """A lower bound on the time of recomputation."""
        return self._again.bound_s(first, end, over_bytes, in_flight)

    def rough_bound_s(
        self, first: IntArray, end: IntArray, over_bytes: FloatArray, in_flight: int
    ) -> FloatArray:
        """A looser bound in less time."""
        return self._again.rough_bound_s(first, end, over_bytes, in_flight)

    def least_s(self, first: IntArray, end: IntArray, in_flight: int) -> FloatArray:
        """A lower bound on the time that holds for all longer stages: no messages, no inputs."""
        over_bytes = self.over_of(self.held(first, end, end - 1), in_flight)
        again_s = self._again.rough_bound_s(first, end, over_bytes, in_flight)
        return self.compute_s(first, end) + again_s

    def recompute(
        self, first: int, end: int, in_flight: int, below_s: float = np.inf
    ) -> Recomputed | None:
        """The least recomputation with which a stage fits; None if none takes less than some s."""
        over_bytes = float(self.over_bytes(np.array(first), np.array(end), in_flight))
        if over_bytes <= 0:
            return Recomputed(0.0, (None,) * (end - first))
        return self._again.solve(first, end, over_bytes, in_flight, below_s)


class _RangeMaximum:
    """The largest of any range of values, at least 0, by maxima over powers of two."""

    def __init__(self, values: FloatArray) -> None:
        self._levels = [values]
        while len(self._levels[-1]) > (width := 1 << len(self._levels) - 1):
            last = self._levels[-1]
            self._levels.append(np.maximum(last[:-width], last[width:]))
        padded = [np.pad(level, (0, len(values) - len(level))) for level in self._levels]
        self._table = np.stack(padded)

    def __call__(self, first: IntArray, end: IntArray) -> FloatArray:
        length = end - first
        level = np.frexp(np.maximum(length, 1))[1] - 1
        largest = np.maximum(
            self._table[level, np.minimum(first, self._table.shape[1] - 1)],
            self._table[level, np.maximum(end - (1 << level), 0)],
        )
        found: FloatArray = np.where(length > 0, largest, 0.0)
        return found


def _sums(values: FloatArray) -> FloatArray:
    """[num_pieces + 1] of all pieces before a cut."""
    return np.concatenate([[0.0], np.cumsum(values)])
