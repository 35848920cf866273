"""The page of a report: views that can be zoomed, moved and asked, in one file of HTML."""

import os
from pathlib import Path

try:
    Path.home()
except RuntimeError:  # no HOME, no entry in passwd: a container's user by number
    os.environ["HOME"] = "/"
    import bokeh.settings  # noqa: F401  # its import asks for the home folder

    del os.environ["HOME"]
