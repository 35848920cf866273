"""The launcher's own messages."""

from __future__ import annotations

import contextlib

import click


def say(text: str) -> None:
    """Print a line to the user's terminal, if there still is one."""
    with contextlib.suppress(OSError):
        click.echo(f"[envpipe] {text}", err=True)
