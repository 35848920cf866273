"""How many layers of a kind are built, to run in a row while time is taken, as in training.

They are layers of their own: one layer that ran several times would have its gradients summed by
autograd, and added to the model's once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from envpipe_megatron.integrations.layer_profile.measuring import lowest

_LAYERS_IN_A_ROW = 4
#: Weight, gradient and optimizer of mixed precision, none of it shared.
_BYTES_PER_PARAMETER = 18
#: Of the free memory, for all kinds together.
_SHARE = 0.25


def row_lengths(of_kind: Sequence[int], parameters: Sequence[int]) -> list[int]:
    """For each kind of layers how many are built, the same on all ranks; every rank calls it.

    Args:
        of_kind: layers that the model has of each kind.
        parameters: of one layer of each kind.
    """
    wanted = [min(count, _LAYERS_IN_A_ROW) for count in of_kind]
    if not torch.cuda.is_available():
        return wanted
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    each = _SHARE * free / len(of_kind) / _BYTES_PER_PARAMETER
    return [
        lowest(max(1, min(count, int(each // size))))
        for count, size in zip(wanted, parameters, strict=True)
    ]
