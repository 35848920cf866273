"""The answer to one of doctor's questions, and how a broken thing cannot stop the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from envpipe_megatron.errors import EnvPipeError


@dataclass(frozen=True)
class Check:
    """One line of `envpipe doctor`.

    Attributes:
        area: what it is about: `gpu`, `control`, `environment` or `software`.
        name: the thing asked for.
        ok: yes or no.
        evidence: what was seen.
        remedy: what makes a no a yes; says so where nothing needs to be done.
    """

    area: str
    name: str
    ok: bool
    evidence: str
    remedy: str = ""


def looked(area: str, name: str, look: Callable[[], Check]) -> Check:
    """Return what `look` finds; a look that fails in any way is a no with the reason."""
    try:
        return look()
    except EnvPipeError as error:
        what = str(error).removesuffix(f". {error.remedy}")
        return Check(area, name, False, what, error.remedy or "Correct what is named there")
    except Exception as error:  # whatever is broken there, the other questions stay
        return Check(
            area,
            name,
            False,
            f"could not be looked at: {type(error).__name__}: {error}",
            "Repair or reinstall it",
        )
