"""Runs torchtitan with EnvPipe attached to its pipeline; no file of torchtitan is changed.

    torchrun --nproc-per-node 4 -m envpipe_megatron.torchtitan --envpipe-output runs/first ...

What begins with --envpipe- is EnvPipe's, as docs/megatron_lm.md lists it; all else is torchtitan's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.options import OPTIONS, flag_of


class TorchtitanError(EnvPipeError):
    """torchtitan is not there, or an option has no value."""


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
    settings: dict[str, object] = {}
    rest: list[str] = []
    ours = {flag_of(name): name for name in OPTIONS}
    left = iter(arguments)
    for word in left:
        if not word.startswith(flag_of("")):
            rest.append(word)
            continue
        flag, is_given, value = word.partition("=")
        if (name := ours.get(flag)) is None:
            names = ", ".join(flag.removeprefix(flag_of("")) for flag in ours)
            raise TorchtitanError(
                "No such option of EnvPipe", value=word, remedy=f"There are {names}."
            )
        if "action" in OPTIONS[name].flag:
            settings[name] = True
            continue
        given = value if is_given else next(left, None)
        if given is None:
            raise TorchtitanError("An option has no value", value=word)
        settings[name] = given
    return settings, rest


if __name__ == "__main__":
    main()
