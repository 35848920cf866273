"""The page of a report: views that can be zoomed, moved and asked, in one file of HTML."""

import os
from pathlib import Path

try:
    Path.home()
except RuntimeError:  # no HOME, no entry in passwd: a container's user by number
    os.environ["HOME"] = "/"  # of a command of ours; Bokeh's import asks for it
