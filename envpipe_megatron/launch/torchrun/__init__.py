"""torchrun on one node: its command line, the options that are filled in for it, and its run.

`cli/jobs/launch.py` calls `command_line`, `options` and, through `launch/node.py`, `run`, in this
order.
"""
