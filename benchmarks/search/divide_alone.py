"""One search in a process of its own, which imports nothing else.

python -m benchmarks.search.divide_alone FOLDER SETTING operators|layers|megatron RESULT

`RESULT` is a pickle of the division, or of the configuration for Megatron, and the most memory of
the process, in MiB.
"""

from __future__ import annotations

import pickle
import resource
import sys
from pathlib import Path

from benchmarks.search.aceso_runs import SETTINGS, divide_setting, read_setting
from benchmarks.search.aceso_space.divide import Division, divide
from benchmarks.search.aceso_space.folding import fold_blocks
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.search.configuration import Configuration
from envpipe_megatron.search.megatron.search import search
from envpipe_megatron.search.megatron.space import Space

#: Virtual stages of a stage in Megatron's space at most.
MAX_CHUNKS = 4


def main(folder: str, name: str, what: str, result: str) -> None:
    """Search a setting: operators with any sizes, whole layers with one, or Megatron's space."""
    setting = SETTINGS[name]
    found: Division | Configuration | None
    if what == "operators":
        found = divide_setting(Path(folder), setting)
    else:
        profile = fold_blocks(read_setting(Path(folder), setting))
        if what == "layers":
            found = divide(profile, setting.job, setting.batches, same_size=True)
        else:
            space, objective = Space(MAX_CHUNKS), Objective(goal=Goal.TIME)
            ranked = search(profile, setting.job, space, objective).ranked
            found = ranked[0].candidate.configuration
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path(result).write_bytes(pickle.dumps((found, memory_mib)))


if __name__ == "__main__":
    main(*sys.argv[1:])
