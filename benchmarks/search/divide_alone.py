"""One search of divisions in a process of its own, which imports nothing else.

python -m benchmarks.search.divide_alone FOLDER SETTING operators|layers RESULT

`RESULT` is a pickle of the division and the most memory of the process, in MiB.
"""

from __future__ import annotations

import pickle
import resource
import sys
from pathlib import Path

from benchmarks.search.aceso_runs import SETTINGS, divide_setting, read_setting
from envpipe_megatron.search.folding import fold_blocks
from envpipe_megatron.search.stages.divide import divide


def main(folder: str, name: str, pieces: str, result: str) -> None:
    """Search a setting: its operators with any sizes, or whole layers with one."""
    setting = SETTINGS[name]
    if pieces == "layers":
        profile = fold_blocks(read_setting(Path(folder), setting))
        division = divide(profile, setting.job, setting.batches, same_size=True)
    else:
        division = divide_setting(Path(folder), setting)
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path(result).write_bytes(pickle.dumps((division, memory_mib)))


if __name__ == "__main__":
    main(*sys.argv[1:])
