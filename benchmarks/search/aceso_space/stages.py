"""All stages that a division below some time can have, with a lower bound on the time of each.

A stage takes, by Aceso's formula (EuroSys'24), its forwards and backwards, what it computes again,
and one message at each end. It holds all its parameters' bytes; for each microbatch in flight its
input and what is not computed again of its activations; the most that one recomputation holds; and
workspace: the largest of any forward and of any backward (the last piece's left out, as Aceso
does), or the least workspace of its parameters if that is more. `StageCosts` answers for arrays of
stages at once, from sums over all pieces before a cut.

Enter at `stage_edges`. A *state* is a number of stages and of GPUs that are still to come. In each
state a stage can begin only from the first cut from which the rest can be done in time to the last
cut that the stages before can have reached in time; both follow stage by stage, since longer stages
take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.search.aceso_space.plans import column
from benchmarks.search.aceso_space.recomputation import Recomputed, StageRecompute
from envpipe_megatron.core.arrays import BoolArray, FloatArray, IntArray
from envpipe_megatron.search.layer_profile import LayerProfile, Sizes


class _Held(NamedTuple):
    """What pieces hold: arrays, of a microbatch where it is activations."""

    parameters: FloatArray
    activation_bytes: FloatArray
    forward_bytes: FloatArray
    backward_bytes: FloatArray


class StageCosts:
    """Costs of stages at some sizes: one GPU, one microbatch.

    Args:
        memory_bytes: that a GPU may hold.

    Attributes:
        piece_s: [num_pieces] forward and backward of each piece.
        receive_s, send_s: [num_pieces + 1] of the message before and behind a cut.
        input_bytes: [num_pieces + 1] what a stage that begins at a cut keeps of its input.
    """

    def __init__(self, profile: LayerProfile, sizes: Sizes, memory_bytes: float) -> None:
        self._memory_bytes = memory_bytes
        each = profile.bytes_per_parameter
        self._parameter_bytes = each.weight + each.gradient + each.optimizer
        self._least_workspace = each.least_workspace
        forward_s = column(profile, sizes, "forward_s")[:, 0]
        self.piece_s = forward_s + column(profile, sizes, "backward_s")[:, 0]
        self._run_s = _sums(self.piece_s)
        self._parameters = _sums(column(profile, sizes, "parameters"))
        self._activations = _sums(column(profile, sizes, "activation_bytes"))
        self.input_bytes = np.append(column(profile, sizes, "input_bytes"), 0.0)
        output_bytes = np.insert(column(profile, sizes, "output_bytes"), 0, 0.0)
        self.receive_s = profile.links.message_s(self.input_bytes, crosses=False)
        self.send_s = profile.links.message_s(output_bytes, crosses=False)
        # Aceso has the last stage send as well, out of the node.
        self.send_s[-1:] = profile.links.message_s(output_bytes[-1:], crosses=True)
        self._forward_workspace = _RangeMaximum(column(profile, sizes, "forward_workspace_bytes"))
        self._backward_workspace = _RangeMaximum(column(profile, sizes, "backward_workspace_bytes"))
        self._again = StageRecompute(profile, sizes)

    def compute_s(self, first: IntArray, end: IntArray) -> FloatArray:
        """Time of forwards and backwards."""
        compute_s: FloatArray = self._run_s[end] - self._run_s[first]
        return compute_s

    def held(self, first: IntArray, end: IntArray, workspace_end: IntArray) -> _Held:
        """What pieces hold without recomputation; workspace of some of them."""
        return _Held(
            self._parameters[end] - self._parameters[first],
            self._activations[end] - self._activations[first],
            self._forward_workspace(first, workspace_end),
            self._backward_workspace(first, workspace_end),
        )

    def over_of(self, held: _Held, in_flight: int) -> FloatArray:
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
        over_bytes = self.over_of(self.held(first, end, end - 1), in_flight)
        over_bytes += in_flight * self.input_bytes[first]
        return over_bytes

    def again_s(
        self, first: IntArray, end: IntArray, over_bytes: FloatArray, in_flight: int
    ) -> FloatArray:
        """A lower bound on the time of recomputation."""
        return self._again.bound_s(first, end, over_bytes, in_flight)

    def least_s(self, first: IntArray, end: IntArray, in_flight: int) -> FloatArray:
        """A lower bound on the time that holds for all longer stages: no messages, no inputs."""
        over_bytes = self.over_of(self.held(first, end, end - 1), in_flight)
        return self.compute_s(first, end) + self.again_s(first, end, over_bytes, in_flight)

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
        levels = [values]
        while len(levels[-1]) > (width := 1 << len(levels) - 1):
            levels.append(np.maximum(levels[-1][:-width], levels[-1][width:]))
        self._table = np.stack([np.pad(each, (0, len(values) - len(each))) for each in levels])

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


@dataclass(frozen=True)
class StageOption:
    """Sizes that a stage can have.

    Args:
        behind: other sizes, on as many GPUs, to which a stage switches before one of its pieces;
            such a stage recomputes nothing.
        switch_s: [num_pieces] of moving a microbatch between the ranks, forward and back.
    """

    sizes: Sizes
    data_parallel: int
    costs: StageCosts
    behind: StageOption | None = None
    switch_s: FloatArray = field(default_factory=lambda: np.empty(0))

    @property
    def num_gpus(self) -> int:
        """GPUs of such a stage."""
        return self.sizes.gpus * self.data_parallel

    def least_s(self, first: IntArray, end: IntArray, in_flight: int) -> FloatArray:
        """A lower bound on the time that holds for all longer stages."""
        if self.behind is None:
            return self.costs.least_s(first, end, in_flight)
        before_s = _sums(np.minimum(self.costs.piece_s, self.behind.costs.piece_s))
        least_s: FloatArray = before_s[end] - before_s[first]
        return least_s


@dataclass(frozen=True)
class Edges:
    """Stages as edges of a graph: [num_edges] arrays.

    Args:
        tail, head: nodes, which are cuts in a state, numbered from the end of the pipeline.
        level: microbatches in flight, which is the number of stages from this one on.
        option: the number of its sizes.
        first, end: its first piece, and the one behind its last.
        switch: the piece before which sizes change; 0 for none.
        outside_s: time without recomputation.
        again_s: a lower bound on the time of recomputation.
    """

    tail: IntArray
    head: IntArray
    level: IntArray
    option: IntArray
    first: IntArray
    end: IntArray
    switch: IntArray
    outside_s: FloatArray
    again_s: FloatArray

    def at(self, kept: BoolArray | IntArray) -> Edges:
        """Some of them."""
        return Edges(*(values[kept] for values in vars(self).values()))


State = tuple[int, int]
#: Numbers of the first and the last cut of some stages; their `switch`, `outside_s` and `again_s`.
Between = tuple[IntArray, IntArray, IntArray, FloatArray, FloatArray]


def stage_edges(
    num_gpus: int, cuts: IntArray, options: Sequence[StageOption], limit_s: float
) -> tuple[Edges, IntArray] | None:
    """Stages of divisions of which every stage takes at most some s, sorted by tail.

    With the nodes at which the first stage can begin; None if there are no stages.

    Args:
        cuts: where stages can begin or end, from 0 to the number of pieces.
    """
    windows = _windows(num_gpus, cuts, options, limit_s)
    if (0, 0) not in windows:
        return None
    nodes, num_nodes = {}, 0
    for state, (low, high) in sorted(windows.items()):
        nodes[state] = num_nodes - low
        num_nodes += high - low + 1
    parts = []
    for (level, gpus), (low, high) in sorted(windows.items()):
        for number, option in enumerate(options):
            behind = (level - 1, gpus - option.num_gpus)
            if behind not in windows:
                continue
            begins = np.arange(low, high + 1)
            ends = np.arange(windows[behind][0], windows[behind][1] + 1)
            stages = _stages_between if option.behind is None else _switched_stages
            begin, end, switch, outside_s, again_s = stages(
                option, cuts, begins, ends, level, limit_s
            )
            parts.append(
                Edges(
                    begin + nodes[(level, gpus)],
                    end + nodes[behind],
                    np.full(len(begin), level),
                    np.full(len(begin), number),
                    cuts[begin],
                    cuts[end],
                    switch,
                    outside_s,
                    again_s,
                )
            )
    if not any(len(part.tail) for part in parts):
        return None
    joined = Edges(*map(np.concatenate, zip(*(vars(each).values() for each in parts), strict=True)))
    starts = [
        nodes[state] for state, (low, _) in windows.items() if state[1] == num_gpus and low == 0
    ]
    return joined.at(np.argsort(joined.tail, kind="stable")), np.array(starts)


def _stages_between(
    option: StageOption,
    cuts: IntArray,
    begins: IntArray,
    ends: IntArray,
    in_flight: int,
    limit_s: float,
) -> Between:
    """Stages from any of some cuts to any of others that stay below a limit."""
    costs, pairs = option.costs, np.nonzero(begins[:, None] < ends)
    begin, end = begins[pairs[0]], ends[pairs[1]]
    outside_s = costs.compute_s(cuts[begin], cuts[end])
    outside_s = outside_s + costs.receive_s[cuts[begin]] + costs.send_s[cuts[end]]
    kept = outside_s <= limit_s
    begin, end, outside_s = begin[kept], end[kept], outside_s[kept]
    over_bytes = costs.over_bytes(cuts[begin], cuts[end], in_flight)
    again_s, full = np.zeros(len(begin)), np.flatnonzero(over_bytes > 0)
    again_s[full] = costs.again_s(cuts[begin[full]], cuts[end[full]], over_bytes[full], in_flight)
    kept = outside_s + again_s <= limit_s
    begin, end = begin[kept], end[kept]
    return begin, end, np.zeros_like(begin), outside_s[kept], again_s[kept]


def _switched_stages(
    option: StageOption,
    cuts: IntArray,
    begins: IntArray,
    ends: IntArray,
    in_flight: int,
    limit_s: float,
) -> Between:
    """The same of an option that switches: each stage with the best switch with which it fits."""
    assert option.behind is not None
    costs, behind = option.costs, option.behind.costs
    first, end = cuts[begins][:, None], cuts[ends][None, :]
    shape = (len(begins), len(ends))
    best_s, best = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
    for switch in range(int(first.min()) + 1, int(end.max())):
        switch_s = option.switch_s[switch]
        if switch_s > limit_s:
            continue
        at, rows, columns = np.array(switch), np.minimum(first, switch), np.maximum(end, switch)
        both = costs.held(rows, at, at), behind.held(at, columns, np.maximum(columns - 1, switch))
        adds = (np.add, np.add, np.maximum, np.maximum)
        held = _Held(*(add(*each) for add, each in zip(adds, zip(*both, strict=True), strict=True)))
        over_bytes = costs.over_of(held, in_flight) + in_flight * costs.input_bytes[rows]
        time_s = costs.compute_s(rows, at) + behind.compute_s(at, columns) + switch_s
        time_s = time_s + costs.receive_s[rows] + behind.send_s[columns]
        inside = (first < switch) & (switch < end)
        better = inside & (over_bytes <= 0) & (time_s < best_s)
        best_s, best = np.where(better, time_s, best_s), np.where(better, switch, best)
    row, column = np.nonzero(best_s <= limit_s)
    outside_s = best_s[row, column]
    return begins[row], ends[column], best[row, column], outside_s, np.zeros(len(row))


def _windows(
    every: int, cuts: IntArray, options: Sequence[StageOption], limit_s: float
) -> dict[State, tuple[int, int]]:
    """For each state, the first and the last number of a cut at which a stage can begin."""
    final = len(cuts) - 1

    def begins_fit(option: StageOption, ends: IntArray, level: int, begins: IntArray) -> BoolArray:
        fit: BoolArray = option.least_s(cuts[begins], cuts[ends], level) <= limit_s
        return fit

    def ends_fit(option: StageOption, begins: IntArray, level: int, before: IntArray) -> BoolArray:
        return begins_fit(option, final - before, level, begins)

    # For each level, from how many GPUs to a number of a cut.
    first = [{0: final}]
    while first[-1]:
        begins: dict[int, int] = {}
        for option in options:
            gpus = [each for each in first[-1] if each + option.num_gpus <= every]
            ends = np.array([first[-1][each] for each in gpus], dtype=np.int64)
            found = _first_fit(partial(begins_fit, option, ends, len(first)), ends)
            for each, end, begin in zip(gpus, ends, found, strict=True):
                if begin < end:
                    total = each + option.num_gpus
                    begins[total] = min(int(begin), begins.get(total, final))
        # A cut behind the first piece leaves a piece to the stages before.
        first.append({gpus: max(cut, int(gpus < every)) for gpus, cut in begins.items()})
    last = [{every: 0} if begins.get(every) == 0 else {} for begins in first]
    for level in range(len(first) - 1, 0, -1):
        behind = level - 1
        for option in options:
            gpus = [each for each in last[level] if each - option.num_gpus in first[behind]]
            from_cuts = np.array([last[level][each] for each in gpus], dtype=np.int64)
            fits = partial(ends_fit, option, from_cuts, level)
            for each, before in zip(gpus, _first_fit(fits, final - from_cuts), strict=True):
                rest = each - option.num_gpus
                end = final - max(int(before), behind)  # a piece for each stage behind
                if end >= first[behind][rest] and end > last[level][each]:
                    last[behind][rest] = max(end, last[behind].get(rest, 0))
    return {
        (level, gpus): (first[level][gpus], cut)
        for level, cuts_of in enumerate(last)
        for gpus, cut in cuts_of.items()
    }


def _first_fit(fits: Callable[[IntArray], BoolArray], high: IntArray) -> IntArray:
    """The smallest numbers from 0 on that fit, as all larger ones do; `high` need not be asked."""
    low = np.zeros_like(high)
    while (low < high).any():
        middle = (low + high) // 2
        fit = fits(middle)
        low, high = np.where(fit, low, middle + 1), np.where(fit, middle, high)
    return low
