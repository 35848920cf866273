"""What the launcher prints of its own."""

from __future__ import annotations

import contextlib

import click


def say(text: str) -> None:
    """Print a line to whoever started the launcher, if they are still there."""
    with contextlib.suppress(OSError):
        click.echo(f"[envpipe] {text}", err=True)
