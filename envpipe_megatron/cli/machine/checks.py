"""The answers to doctor's questions, and how a broken thing cannot stop the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from envpipe_megatron.errors import EnvPipeError


@dataclass(frozen=True)
class Check:
    """One line of `envpipe doctor`.

    Attributes:
        area: `gpu`, `control`, `environment` or `software`.
        evidence: what was seen.
        remedy: what turns a no into a yes, or a note that nothing needs to be done.
    """

    area: str
    name: str
    ok: bool
    evidence: str
    remedy: str = ""


#: `ok`, `evidence` and `remedy` of a check; the remedy counts only if it is a no.
Answer = tuple[bool, str, str]


def looked(area: str, looks: Mapping[str, Callable[[], Answer]]) -> list[Check]:
    """What each look finds, by the name of its check; one that fails in any way is a no."""
    return [_looked(area, name, look) for name, look in looks.items()]


def _looked(area: str, name: str, look: Callable[[], Answer]) -> Check:
    try:
        ok, evidence, remedy = look()
    except EnvPipeError as error:
        ok, evidence = False, str(error).removesuffix(f". {error.remedy}")
        remedy = error.remedy or "Correct what is named there"
    except Exception as error:  # whatever is broken there, the other questions stay
        ok, evidence = False, f"could not be looked at: {type(error).__name__}: {error}"
        remedy = "Repair or reinstall it"
    return Check(area, name, ok, evidence, "" if ok else remedy)
