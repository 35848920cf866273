"""Versions of DeepSpeed and Transformers that EnvPipe was tried with, and the installed ones.

Versions of Megatron are those of the patches.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from envpipe_megatron.errors import EnvPipeError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

#: From the first that was tested, below the next minor one: parts of its engine may change.
DEEPSPEED = "deepspeed>=0.19.6,<0.20"
#: As DEEPSPEED: the modules of a model may change. 5.0, 5.8, 5.16 and 5.24 were tested.
TRANSFORMERS = "transformers>=5.0,<5.25"


def is_tested(version: str, wanted: str) -> bool:
    """Return whether a version is in DEEPSPEED or TRANSFORMERS; no prerelease of an end is."""
    return _requirement(wanted).specifier.contains(version, prereleases=True)


def check(version: str, wanted: str, error: type[EnvPipeError], instead: str = "") -> None:
    """Refuse by an error of this kind a version that EnvPipe was not tried with."""
    if not is_tested(version, wanted):
        raise error(
            f"EnvPipe was not tried with this version of {_requirement(wanted).name}",
            value=version,
            remedy=f"Install {wanted}{instead}.",
        )


def _requirement(wanted: str) -> Requirement:
    from packaging.requirements import Requirement  # commands that ask for none start without it

    return Requirement(wanted)


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
