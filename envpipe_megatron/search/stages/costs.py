"""What any run of pieces takes and holds as a stage, by Aceso's formula (EuroSys'24, section 3.2).

A stage takes its forwards and backwards, what it computes again, and one message at each end. It
holds all its parameters' bytes; for each microbatch in flight its input and what is not computed
again of its activations; the most that one recomputation holds; and workspace: the largest of any
forward and of any backward (the last piece's left out, as Aceso does), or the least workspace of
its parameters if that is more.

`StageCosts` answers for arrays of stages at once, from sums over all pieces before a cut.
"""

from __future__ import annotations

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.search.layer_profile import LayerProfile, Sizes
from envpipe_megatron.search.stages.recomputation import Recomputed, StageRecompute


class StageCosts:
    """Costs of stages at some sizes: one GPU, one microbatch.

    Args:
        memory_bytes: that a GPU may hold.
    """

    def __init__(self, profile: LayerProfile, sizes: Sizes, memory_bytes: float) -> None:
        self._memory_bytes = memory_bytes
        each = profile.bytes_per_parameter
        self._parameter_bytes = each.weight + each.gradient + each.optimizer
        self._least_workspace = each.least_workspace
        forward_s = profile.column(sizes, "forward_s")[:, 0]
        self._run_s = _sums(forward_s + profile.column(sizes, "backward_s")[:, 0])
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

    def run_s(
        self,
        first: IntArray,
        end: IntArray,
        crosses_before: bool = False,
        crosses_behind: bool = False,
    ) -> FloatArray:
        """Time with messages and without recomputation."""
        messages_s = self._receive_s[crosses_before][first] + self._send_s[crosses_behind][end]
        run_s: FloatArray = self._run_s[end] - self._run_s[first] + messages_s
        return run_s

    def over_bytes(self, first: IntArray, end: IntArray, in_flight: int) -> FloatArray:
        """How much more than the memory is held without recomputation."""
        inputs: FloatArray = in_flight * self._input_bytes[first]
        return self._over_bytes(first, end, in_flight) + inputs

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
        over_bytes = self._over_bytes(first, end, in_flight)
        again_s = self._again.rough_bound_s(first, end, over_bytes, in_flight)
        least_s: FloatArray = self._run_s[end] - self._run_s[first] + again_s
        return least_s

    def recompute(
        self, first: int, end: int, in_flight: int, below_s: float = np.inf
    ) -> Recomputed | None:
        """The least recomputation with which a stage fits; None if none takes less than some s."""
        over_bytes = float(self.over_bytes(np.array(first), np.array(end), in_flight))
        if over_bytes <= 0:
            return Recomputed(0.0, (None,) * (end - first))
        return self._again.solve(first, end, over_bytes, in_flight, below_s)

    def _over_bytes(self, first: IntArray, end: IntArray, in_flight: int) -> FloatArray:
        parameters = self._parameters[end] - self._parameters[first]
        workspace = self._forward_workspace(first, end - 1) + self._backward_workspace(
            first, end - 1
        )
        over_bytes: FloatArray = (
            self._parameter_bytes * parameters
            + in_flight * (self._activations[end] - self._activations[first])
            + np.maximum(workspace, self._least_workspace * parameters)
            - self._memory_bytes
        )
        return over_bytes


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
