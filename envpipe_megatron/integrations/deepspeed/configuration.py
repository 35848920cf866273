"""The block of EnvPipe in a DeepSpeed configuration, and the versions of DeepSpeed it goes with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import deepspeed

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations import versions
from envpipe_megatron.integrations.settings import merged

BLOCK = "envpipe"
#: Where DeepSpeed looks for its configuration, before `args`.
_PLACES = ("config", "config_params")


class BlockError(EnvPipeError):
    """A configuration of DeepSpeed whose block for EnvPipe is wrong."""


class VersionError(EnvPipeError):
    """A version of DeepSpeed that EnvPipe was not tried with."""


def check_version() -> None:
    """Refuse by a VersionError those that EnvPipe was not tried with."""
    if not versions.is_tested(deepspeed.__version__, versions.DEEPSPEED):
        oldest, beyond = map(versions.as_text, versions.DEEPSPEED)
        raise VersionError(
            "EnvPipe was not tried with this version of DeepSpeed",
            value=deepspeed.__version__,
            remedy=f"Install deepspeed>={oldest},<{beyond}, or train without EnvPipe.",
        )


def take_block(
    given: Mapping[str, Any], settings: Mapping[str, object] | bool | None
) -> tuple[dict[str, Any], dict[str, object] | None]:
    """Take EnvPipe's settings out of what `deepspeed.initialize` is called with.

    Args:
        given: arguments of `deepspeed.initialize` by name. Left as they are.
        settings: those of the call, which go before those of the block; True for none but those of
            the block, False to train without EnvPipe, None to leave it to the block.

    Returns:
        the arguments for DeepSpeed, without the block; the settings, or None to train without
        EnvPipe.
    """
    config = parsed_config(given)
    block = config.get(BLOCK)
    if block is not None and not isinstance(block, Mapping):
        raise BlockError(
            f"The block '{BLOCK}' of the DeepSpeed configuration is a table of options",
            value=block,
            remedy='Write "envpipe": {"type": "envelope", "scheduling": "ours"}, say.',
        )
    arguments = dict(given)
    if block is not None:
        plain = {name: value for name, value in config.items() if name != BLOCK}
        arguments = _with_config(arguments, plain)
    if settings is False or (settings is None and block is None):
        return arguments, None
    return arguments, merged(block or {}, settings if isinstance(settings, Mapping) else {})


def parsed_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration among the arguments of `deepspeed.initialize`; empty without."""
    config = next((arguments[name] for name in _PLACES if arguments.get(name) is not None), None)
    if config is None:
        config = getattr(arguments.get("args"), "deepspeed_config", None)
    if config is None or isinstance(config, dict):
        return config or {}
    parsed: dict[str, Any] = deepspeed.load_ds_config(config)  # a path, or encoded text
    return parsed


def _with_config(arguments: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with another configuration; what DeepSpeed makes of two stays its own."""
    rest = {name: value for name, value in arguments.items() if name not in _PLACES}
    if not any(arguments.get(name) is not None for name in _PLACES):
        rest["args"] = copy.copy(arguments["args"])
        rest["args"].deepspeed_config = None
    return {**rest, "config": config}
