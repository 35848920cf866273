"""Tests that take too long to run each time."""

import os

import pytest


def on_request(what: str) -> pytest.MarkDecorator:
    """Skip unless ENVPIPE_<what>_FULL=1 asks for it."""
    variable = f"ENVPIPE_{what}_FULL"
    return pytest.mark.skipif(
        os.environ.get(variable, "") in ("", "0"), reason=f"takes long: set {variable}=1"
    )
