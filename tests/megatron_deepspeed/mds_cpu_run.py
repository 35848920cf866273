"""Runs an entry script of a Megatron-DeepSpeed checkout on the CPU, on gloo.

    DS_ACCELERATOR=cpu LOCAL_SIZE=4 torchrun --nproc-per-node 4 mds_cpu_run.py SCRIPT ARGS...

DeepSpeed's CPU accelerator answers most questions about a GPU; LOCAL_SIZE tells it how many there
are. EnvPipe is not imported here, so that what a checkout imports by itself can be seen.
"""

import faulthandler
import importlib.machinery
import importlib.util
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).parents[1] / "megatron_lm"))
import cpu_run  # sets TORCHDYNAMO_DISABLE before torch is imported
import torch


class _Nothing(ModuleType):
    """A module whose names may be imported and inherited from, and do nothing."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def name_unused_modules() -> None:
    """Stand in for what `megatron/training.py` imports unasked: torchvision, and compression.

    DeepSpeed has no `compression.compress` from 0.19.7 on.
    """
    names = ["torchvision", "torchvision.transforms", "torchvision.datasets"]
    for name in [*names, "deepspeed.compression.compress"]:
        if importlib.util.find_spec(name) is None:
            module = _Nothing(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
            module.__path__ = []
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)


def main() -> None:
    """Run the script named first, with the arguments after it, as torchrun would."""
    script = Path(sys.argv[1]).resolve()
    sys.path[0] = str(script.parent)
    sys.argv = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads
    torch.set_num_threads(1)
    name_unused_modules()
    from megatron import training

    engines = cpu_run.remember_model(training)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    cpu_run.tell(engines)
    # Process groups that the interpreter's end meets alive abort one rank now and then.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
