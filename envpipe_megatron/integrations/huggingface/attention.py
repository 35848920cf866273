"""What the layers of a stage share: attention masks and rotary angles.

Masks are those that transformers makes, without its looks at a mask's content: on a GPU these wait
for the device within a unit.
"""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn

#: The implementations of attention whose masks are made here.
IMPLEMENTATIONS = ("sdpa", "eager")
#: Lengths whose masks and angles are kept.
_KEPT = 8


class Attention:
    """Makes masks and angles, once for each length, data type and device.

    Args:
        implementation: of attention, one of `IMPLEMENTATIONS`.
        rotary: transformers' module with frequencies on the CPU, None for models without. It is no
            part of a layer: an engine that puts layers into half precision would round them.
    """

    def __init__(self, implementation: str, rotary: nn.Module | None = None) -> None:
        self._as_bias = implementation == "eager"
        self._rotary = rotary
        self._copies: dict[torch.device, nn.Module] = {}
        self._causal = functools.lru_cache(_KEPT)(self._make_causal)
        self._angles = functools.lru_cache(_KEPT)(self._make_angles)

    def causal(self, hidden: Tensor, window: int | None = None) -> Tensor | None:
        """What each position of [samples, length, hidden] sees: those before it, and itself.

        With a window, that many at most. None where attention does so without a mask; else
        [1, 1, length, length].
        """
        length = hidden.shape[1]
        if window is not None and length <= window:
            window = None
        if not self._as_bias and window is None:
            return None
        return self._causal(length, window, hidden.dtype, hidden.device)

    def padding(self, hidden: Tensor, is_token: Tensor | None) -> Tensor | None:
        """The mask for padding, [samples, 1, 1, length]; `is_token` is true or 1 for tokens."""
        if is_token is None:
            return None
        return self._finished(is_token.bool()[:, None, None, :], hidden.dtype)

    def angles(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [1, length, width of a head]."""
        found: tuple[Tensor, Tensor] = self._angles(hidden.shape[1], hidden.dtype, hidden.device)
        return found

    def _make_causal(
        self, length: int, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        with torch.inference_mode(False):  # it may be kept for training
            position = torch.arange(length, device=device)
            back = position[:, None] - position[None, :]
            seen = (back >= 0) if window is None else (back >= 0) & (back < window)
            return self._finished(seen[None, None], dtype)

    def _make_angles(
        self, length: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        assert self._rotary is not None
        with torch.inference_mode(False), torch.no_grad():
            # Older versions switch autocast off, which no `meta` has.
            where = torch.device("cpu") if device.type == "meta" else device
            if where not in self._copies:  # a copy to a GPU waits for it: once, and never again
                self._copies[where] = copy.deepcopy(self._rotary).to(where)
            rotary = self._copies[where]
            positions = torch.arange(length, device=where)[None]
            cosines, sines = rotary(torch.empty(0, dtype=dtype, device=where), positions)
        return cosines.to(device), sines.to(device)

    def _finished(self, seen: Tensor, dtype: torch.dtype) -> Tensor:
        if not self._as_bias:
            return seen
        zero = torch.zeros((), dtype=dtype, device=seen.device)
        return torch.where(seen, zero, torch.finfo(dtype).min)
