"""The block of EnvPipe in a DeepSpeed configuration, and the versions of DeepSpeed it goes with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import deepspeed
from packaging.version import Version

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations import versions
from envpipe_megatron.integrations.settings import merged

BLOCK = "envpipe"


class BlockError(EnvPipeError):
    """A configuration of DeepSpeed whose block for EnvPipe is wrong."""


class VersionError(EnvPipeError):
    """A version of DeepSpeed that EnvPipe was not tried with."""


def check_version() -> None:
    """Refuse versions of DeepSpeed that EnvPipe was not tried with.

    Raises:
        VersionError: naming those that it was.
    """
    oldest, beyond = map(versions.as_text, versions.DEEPSPEED)
    if not Version(oldest) <= Version(deepspeed.__version__) < Version(beyond):
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
        the arguments for DeepSpeed, which has no part in the block; the settings, or None to train
        without EnvPipe.

    Raises:
        BlockError: the block is no table.
        OptionError: two names of one option.
    """
    config = _config(given)
    if not isinstance(config, dict):
        config = deepspeed.load_ds_config(config) if config is not None else {}
    block = config.get(BLOCK)
    if block is not None and not isinstance(block, Mapping):
        raise BlockError(
            f"The block '{BLOCK}' of the DeepSpeed configuration is a table of options",
            value=block,
            remedy='Write "envpipe": {"type": "envelope", "scheduling": "ours"}, say.',
        )
    arguments = dict(given)
    if block is not None:
        arguments = _without_config(arguments)
        arguments["config"] = {name: value for name, value in config.items() if name != BLOCK}
    if settings is False or (settings is None and block is None):
        return arguments, None
    return arguments, merged(block or {}, settings if isinstance(settings, Mapping) else {})


def _config(given: Mapping[str, Any]) -> Any:
    """What DeepSpeed would take for its configuration: a table, a path or encoded text."""
    for name in ("config", "config_params"):
        if given.get(name) is not None:
            return given[name]
    return getattr(given.get("args"), "deepspeed_config", None)


def _without_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same arguments, with the configuration in none of the places where it may be."""
    rest = {name: value for name, value in arguments.items() if name != "config_params"}
    args = rest.get("args")
    if getattr(args, "deepspeed_config", None) is not None:
        rest["args"] = copy.copy(args)
        rest["args"].deepspeed_config = None
    return rest


def parsed_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration, for telling jobs apart."""
    config = _config(arguments)
    return config if isinstance(config, dict) else dict(deepspeed.load_ds_config(config))
