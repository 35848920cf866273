"""Units as torch.distributed.pipelining runs them, told to whoever wants to know."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.integrations.framework_units import Reporter, Seen

_ORDINARY = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"


class Units:
    """Tells `reporter` of the units of this rank's stages; of none while there is no reporter.

    On the last stage a forward ends behind its loss, which the schedule computes.

    Args:
        stages: of this rank, in the order of their chunks.
        split: whether the order lists whole backwards as two parts that run as one.
    """

    def __init__(self, stages: Iterable[Any], *, split: bool) -> None:
        self.reporter: Reporter | None = None
        #: Whether a forward has drawn random numbers; None where nobody wants to know.
        self.drew: bool | None = None
        self._split = split
        self._awaits_loss = False
        for chunk, stage in enumerate(stages):
            for name in _ORDINARY:
                setattr(stage, name, self._around(stage, chunk, name))

    def of(self, schedule: Any) -> None:
        """Have a schedule of these stages say when it has computed a loss."""
        compute = schedule._maybe_compute_loss
        if getattr(compute, "of_envpipe", False):
            return

        def maybe_compute_loss(*args: Any, **kwargs: Any) -> Any:
            result = compute(*args, **kwargs)
            if self._awaits_loss:
                self._awaits_loss = False
                self._end()
            return result

        maybe_compute_loss.of_envpipe = True  # type: ignore[attr-defined]
        schedule._maybe_compute_loss = maybe_compute_loss

    def _around(self, stage: Any, chunk: int, name: str) -> Callable[..., Any]:
        run = getattr(stage, name)

        def forward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if self.reporter is None:
                return run(microbatch, *args, **kwargs)
            self.reporter.begin(Seen(Kind.FORWARD, microbatch, chunk))
            before = None if self.drew is None else _random_state(stage.device)
            result = run(microbatch, *args, **kwargs)
            if before is not None and not torch.equal(before, _random_state(stage.device)):
                self.drew = True
            self._awaits_loss = stage.is_last
            if not self._awaits_loss:
                self._end()
            return result

        def backward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if self.reporter is None:
                return run(microbatch, *args, **kwargs)
            whole = args[1] if len(args) > 1 else kwargs.get("full_backward", True)
            if not whole:
                self.reporter.begin(Seen(Kind.INPUT_GRADIENT, microbatch, chunk))
            elif self._split:
                self.reporter.begin(Seen(Kind.INPUT_GRADIENT, microbatch, chunk, combined=True))
                self.reporter.end()
                self.reporter.begin(Seen(Kind.WEIGHT_GRADIENT, microbatch, chunk))
            else:
                self.reporter.begin(Seen(Kind.BACKWARD, microbatch, chunk))
            result = run(microbatch, *args, **kwargs)
            self._end()
            return result

        def weight_gradient(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if self.reporter is None:
                return run(microbatch, *args, **kwargs)
            self.reporter.begin(Seen(Kind.WEIGHT_GRADIENT, microbatch, chunk))
            result = run(microbatch, *args, **kwargs)
            self._end()
            return result

        return dict(zip(_ORDINARY, (forward, backward, weight_gradient), strict=True))[name]

    def _end(self) -> None:
        if self.reporter is not None:
            self.reporter.end()


def _random_state(device: torch.device) -> torch.Tensor:
    """State of the numbers that a forward may draw; on a GPU, known without a wait for it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()
