"""A quickstart that is over soon, and a look at the processes and GPUs of one."""

import os
import time
from pathlib import Path

from presets import write_changed_preset

from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.emulated.store import list_emulated
from envpipe_megatron.trials.settings import Settings


def write_text(path, size=20_000):
    lines = (f"{n} green bottles hang on the wall of room {n * n}.\n" for n in range(size))
    text = ""
    while len(text) < size:
        text += next(lines)
    path.write_text(text)
    return path


def write_coarse_preset(path):
    """An A100 with few clocks on both sides of its valley, and a counter that refreshes more often.

    Each is profiled for ten refreshes, which ranks wait for.
    """
    changes = {"frequency_step_mhz": 210, "min_frequency_mhz": 570, "refresh_s": 0.05}
    return write_changed_preset(path, changes)


def short_settings(folder, **changes):
    """Few iterations of a smaller model; its output goes to `out` in the folder."""
    return Settings(
        **{
            "output_dir": str(folder / "out"),
            "text": str(write_text(folder / "text.txt")),
            "preset": str(write_coarse_preset(folder / "coarse.toml")),
            "num_layers": 4,
            "sequence_length": 32,
            "num_microbatches": 6,
            "forward_time_s": 0.010,
            "steady_iterations": 2,
            "warmup_iterations": 2,
            **changes,
        }
    )


def locks_mhz(output):
    """The lock of each emulated GPU of a run, None where there is none."""
    root = output / "emulated"
    return [EmulatedGpu.open(root, i).requested_frequency_mhz for i in list_emulated(root)]


def processes_of(output):
    """{process: rank, or None for torchrun} of all that run for this output folder."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # ended meanwhile
        files = {os.fsencode(output / name) for name in ("settings.json", "prove.json")}
        if files & set(command):
            ranks = [int(v[5:]) for v in environment if v.startswith(b"RANK=")]
            found[int(folder.name)] = ranks[0] if ranks else None
    return found


def wait_until(condition, timeout_s, what):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.05)


def turn(arm, number=0, time_s=0.5, energy_j=50.0, **changes):
    """Return what a rank reports of a turn on two GPUs."""
    stage = {
        "weights_sha256": "a", "clocks": {"error": None, "followed": None, "changes": 1},
        "executed": ["F0", "B0"], "temperature_c": [40, 50],
    }  # fmt: skip
    return {
        "event": "turn", "arm": arm, "round": number, "notes": [], "failure": "",
        "step": {"iterations": 2, "time_s": time_s, "energy_j": energy_j},
        "losses": [[4.0, 3.5], [3.0, 2.5]], "stages": [stage, stage], **changes,
    }  # fmt: skip
