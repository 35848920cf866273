"""Versions: those of DeepSpeed and Transformers that EnvPipe goes with, and what is installed.

Those of Megatron are the patches'.
"""

from __future__ import annotations

from importlib import metadata

from envpipe_megatron.errors import EnvPipeError

#: From the first that was tested, below the next minor one: what its engine is made of is not
#: promised to stay.
DEEPSPEED = ((0, 19, 6), (0, 20))
#: As DEEPSPEED: which modules a model is made of is not promised to stay. 5.0, 5.8, 5.16 and 5.24
#: were tested.
TRANSFORMERS = ((5, 0), (5, 25))


def is_tested(version: str, of: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Whether a version is one of DEEPSPEED or TRANSFORMERS; of either end, no prerelease is."""
    from packaging.version import Version  # commands that ask for no version start without it

    found = Version(version)
    return Version(as_text(of[0])) <= found and found.release < of[1]


def check(
    name: str,
    version: str,
    of: tuple[tuple[int, ...], tuple[int, ...]],
    error: type[EnvPipeError],
    instead: str = "",
) -> None:
    """Refuse by an error of this kind a version that EnvPipe was not tried with."""
    if not is_tested(version, of):
        oldest, beyond = map(as_text, of)
        raise error(
            f"EnvPipe was not tried with this version of {name}",
            value=version,
            remedy=f"Install {name.lower()}>={oldest},<{beyond}{instead}.",
        )


def as_text(version: tuple[int, ...]) -> str:
    """As pip writes it."""
    return ".".join(map(str, version))


def version_of(*distributions: str) -> str | None:
    """Return the version of the first distribution that is installed, None if none is."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None
