"""Runs torchtitan with EnvPipe attached to its pipeline; no file of torchtitan is changed.

    torchrun --nproc-per-node 4 -m envpipe_megatron.torchtitan --envpipe-output runs/first ...

What begins with --envpipe- is EnvPipe's, as docs/megatron_lm.md lists it; all else is torchtitan's.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.options import add_arguments, flag_of
from envpipe_megatron.runtime.job.options import OPTIONS


class TorchtitanError(EnvPipeError):
    """torchtitan is not there, or an option is wrong."""


def main() -> None:
    """Hook torchtitan's trainer, and run its own command."""
    try:
        settings, sys.argv[1:] = divided(sys.argv[1:])
        try:
            import torchtitan.train as command  # type: ignore[import-not-found]
        except ImportError as error:
            raise TorchtitanError(
                f"torchtitan cannot be imported: {error}",
                remedy="Install it, or run this in its checkout, with its requirements.",
            ) from error
        from envpipe_megatron.integrations.torch_pipelining.torchtitan import hook

        hook(command.Trainer, **settings)
    except EnvPipeError as error:
        sys.exit(f"Error: {error}")
    # Releases up to 0.2 are given the class of the trainer.
    takes_trainer = bool(inspect.signature(command.main).parameters)
    command.main(*[command.Trainer] * takes_trainer)


def divided(arguments: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """EnvPipe's settings by name, and what else a command line has."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    add_arguments(parser.add_argument_group())
    try:
        found, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise TorchtitanError(str(error)) from None
    prefix = flag_of("")
    if unknown := [word for word in rest if word.startswith(prefix)]:
        names = ", ".join(flag_of(name).removeprefix(prefix) for name in OPTIONS)
        raise TorchtitanError(
            "No such option of EnvPipe", value=unknown, remedy=f"There are {names}."
        )
    given = {name: value for name, value in vars(found).items() if value is not None}
    return {name.removeprefix("envpipe_"): value for name, value in given.items()}, rest


if __name__ == "__main__":
    main()
