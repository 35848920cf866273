"""Wishes of an operator for a job that runs, and `control.json`, which says it.

```json
{"power_budget": "80%", "off": false}
```

Both may be left out. A budget is the mean power of one GPU in W, or a share of what it takes in the
framework's own order at the highest clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envpipe_megatron.core.fields import FLAG, POWER, Number, parse_json

CONTROL_FILE = "control.json"
_WATTS = replace(POWER, positive=True)
_PERCENT = Number(positive=True, below=100.001)


@dataclass(frozen=True)
class Wishes:
    """Wishes for the whole job, from its next window on.

    Attributes:
        power_budget_w: mean power of one GPU of the job over an iteration, at most, W; None for no
            budget in watts.
        power_budget_share: the same as a share of what a GPU takes in the framework's own order at
            the highest clocks; None for no such budget. At most one of both is set.
        off: whether the framework's own order runs, with the clocks given back.
    """

    power_budget_w: float | None = None
    power_budget_share: float | None = None
    off: bool = False

    @property
    def power_budget(self) -> float | str | None:
        """The budget as the file has it."""
        share = self.power_budget_share
        return self.power_budget_w if share is None else f"{100 * share:.10g}%"

    def to_json(self) -> dict[str, Any]:
        """Return the file's object."""
        return {"power_budget": self.power_budget, "off": self.off}


#: Save energy, with no budget.
NO_WISHES = Wishes()


def read_power_budget(given: Any) -> Wishes:
    """Read W (250 or "250"), a share ("80%"), or None for no budget; ValueError says that."""
    try:
        if isinstance(given, str):
            if given.endswith("%"):
                return Wishes(power_budget_share=_PERCENT.of_text(given[:-1]) / 100)
            given = _WATTS.of_text(given)
        return Wishes(None if given is None else _WATTS(given))
    except ValueError:
        raise ValueError(
            "the mean power of a GPU in W (250), or a share of what it takes at full clock (80%)"
        ) from None


@dataclass(frozen=True)
class _File:
    power_budget: Wishes = NO_WISHES
    off: bool = False


def parse_wishes(text: str, path: Path) -> Wishes:
    """Read the text of a control file; EnvPipeError, with its path, for anything else."""
    fields = parse_json(text, path, "Control file")
    asked = fields.make(_File, {"power_budget": read_power_budget, "off": FLAG})
    return replace(asked.power_budget, off=asked.off)
