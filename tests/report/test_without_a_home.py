"""A page is made where no home folder is known, as of `docker run --user 12345`."""

import os
import subprocess
import sys

# The user's id has no entry in passwd.
SCRIPT = """
import pwd
def getpwuid(uid):
    raise KeyError(uid)
pwd.getpwuid = getpwuid
from envpipe_megatron.report.page.document import page_text
assert "<html" in page_text("title", ["mark"], [], "report")
"""


def test_a_user_without_a_home_gets_a_page():
    environ = {name: value for name, value in os.environ.items() if name != "HOME"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
