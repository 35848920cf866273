"""The result of a run, to compare with another's: to the last bit, or by as much as by chance.

If two runs of the framework's own are the same, another order's is to be the same. If they are not,
as with kernels that add in any order, another order's may differ from them by a few times as much
as they do from each other.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

#: How much further a gradient may be from the framework's than its two runs are from each other; as
#: far apart as the most of their own size, they show nothing. The least is of a few elements that
#: are rounded otherwise, which a sample may miss.
_TIMES_AS_MUCH, _LEAST_NOISE, _MOST_NOISE = 4.0, 1e-4, 1e-2
#: Elements of a gradient whose differences are looked at; columns of its sums, and elements that
#: are summed at a time.
_SAMPLE, _COLUMNS, _SLICE = 4096, 4096, 2**24


@dataclass(frozen=True)
class Outcome:
    """The result of one run of an iteration, or of a backward, on this rank.

    Args:
        digests: of each gradient by its parameter's name, and of the losses.
        samples: [sample] of each of them on the host, gradients' evenly spaced.
        finite: whether all gradients are.
    """

    digests: dict[str, bytes]
    samples: dict[str, torch.Tensor]
    finite: bool

    @classmethod
    def of(cls, gradients: Mapping[str, torch.Tensor], losses: Sequence[Any] = ()) -> Outcome:
        """Read the gradients of a run, by name, and its losses."""
        numbers = [
            value.detach().float().flatten().cpu()
            for value in tree_leaves(losses)
            if isinstance(value, torch.Tensor)
        ]
        samples = {"losses": torch.cat(numbers) if numbers else torch.zeros(0, device="cpu")}
        digests = {"losses": samples["losses"].numpy().tobytes()}
        finite = True
        for name, gradient in gradients.items():
            flat, name = gradient.detach().flatten(), f"gradients of {name}"
            digests[name] = _digest(flat)
            # By an odd step, since even ones keep to a few columns, which may be of dead neurons.
            samples[name] = flat[:: flat.numel() // _SAMPLE | 1].float().cpu()
            finite = finite and bool(flat.sum(dtype=torch.float32).isfinite())
        return cls(digests, samples, finite)

    def differs_from(self, other: Outcome) -> str | None:
        """Return the name of the first that is not the same; None if all are."""
        names = dict.fromkeys((*self.digests, *other.digests))
        differ = (n for n in names if self.digests.get(n) != other.digests.get(n))
        return next(differ, None)

    def noise(self, again: Outcome) -> float:
        """Return the median difference of what differs in another run, as a share of its size."""
        shares = [
            float((own - again.samples[name]).norm() / own.norm())
            for name, own in self.samples.items()
            if own.norm() > 0
        ]
        return statistics.median([share for share in shares if share] or [0.0])

    def strays_from(self, other: Outcome, again: Outcome) -> str | None:
        """Say which first differs from another order's by more than chance; None if none does.

        Chance is its difference from another run of its own, and the median of all that differ.
        """
        noise = self.noise(again)
        if not noise <= _MOST_NOISE:
            return f"gradients of two runs of one order differ by {noise:.1e} of their size"
        for name, own in self.samples.items():
            if name not in other.samples:
                return f"there are no {name}"
            seen = float((own - again.samples[name]).norm())
            by_chance = seen + max(noise if seen else 0.0, _LEAST_NOISE) * float(own.norm())
            distance = float((own - other.samples[name]).norm())
            if not distance <= _TIMES_AS_MUCH * by_chance:  # so for what is no number
                return f"{name} differ by {distance:.1e}, by chance they would by {by_chance:.1e}"
        return None


def _digest(flat: torch.Tensor) -> bytes:
    """Return a digest of all bits: of their sums along rows and along columns."""
    types = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    found = hashlib.sha256()
    for bits in torch.split(flat.view(types[flat.element_size()]), _SLICE):
        whole = bits.numel() - bits.numel() % _COLUMNS
        rows = bits[:whole].view(-1, _COLUMNS)
        for part in (rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), bits[whole:]):
            found.update(part.cpu().numpy().tobytes())
    return found.digest()
