"""A vendor that this project does not know, added by a package beside it: its driver is a file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

CODE = '''
import json, os, time
from pathlib import Path

from envpipe_megatron.gpu.base import (
    ClockState, GpuAddress, GpuError, NoDriverError
)
from envpipe_megatron.gpu.energy_counter import EnergyCounter
from envpipe_megatron.gpu.registry import Device, Driver, VendorGpu


def driver():
    """Return the driver's answers: cards, who may lock, and which are sealed."""
    try:
        return json.loads(Path(os.environ["ACME_DRIVER"]).read_text())
    except KeyError:
        raise NoDriverError("no Acme driver is loaded", remedy="Load it") from None


class AcmeGpu(VendorGpu):
    """A card `acme.x`. Its driver writes down what it is asked; its counter says no instants."""

    backend = "acme"
    read_apart = True
    name = "Acme One"
    supported_frequencies_mhz = (900, 800, 700, 600)

    def __init__(self, uid):
        if uid not in driver()["cards"]:
            raise GpuError("Acme has no such card", value=uid)
        self.address = GpuAddress("acme", uid)
        self._counter = EnergyCounter(lambda: time.monotonic() // 0.1 * 10.0, uid)

    @classmethod
    def owns(cls, uid):
        return uid.startswith("acme.")

    @classmethod
    def list_gpus(cls):
        return tuple(
            Device("acme", number, uid, cls.name, f"0000:0{number}:00.0")
            for number, uid in enumerate(driver()["cards"])
        )

    @classmethod
    def uid_of_cuda_device(cls, uuid):
        return uuid.removeprefix("torch-")

    @classmethod
    def from_uid(cls, uid, reset_range_mhz=None):
        return cls(uid)

    @classmethod
    def driver(cls):
        return Driver(driver()["version"])

    @classmethod
    def rights(cls, site, devices):
        if not driver()["granted"]:
            raise GpuError("this user is not in the group acme", remedy="Join it")
        if driver()["granted"] == "perhaps":
            raise ZeroDivisionError("of the vendor's")
        return f"the group acme may lock {len(devices)} cards"

    def obstacle(self):
        if self.address.uid in driver()["sealed"]:
            return GpuError("The card is sealed", value=self.address.uid, remedy="Break the seal")
        return None

    def _tell(self, what):
        with open(os.environ["ACME_DRIVER"] + ".told", "a") as file:
            file.write(f"{os.getpid()} {self.address.uid} {what}\\n")

    def _lock(self, frequency_mhz):
        self._tell(frequency_mhz)

    def _reset(self):
        self._tell("reset")

    power_w = 100.0

    def clock_state(self):
        return ClockState(None, 900)

    def read_energy(self):
        return self._counter.read()
'''

#: Two ranks on two cards, whose units take what those of emulated GPUs take.
SESSION = """
import json, sys
from pathlib import Path
import plain_stages
from forked_ranks import run_forked
from envpipe_megatron.gpu.registry import uid_of_cuda_device
from envpipe_megatron.runtime.clocks.rank_clock import open_rank_gpu
from envpipe_megatron.runtime.job.options import JobOptions

def train(rank):
    def opened(emulated):
        uid = uid_of_cuda_device(f"torch-acme.{'ab'[rank]}")
        return open_rank_gpu(uid, plain_stages.lone_pipeline(2), "auto", require=True)[0]

    root = Path(sys.argv[1])
    config = JobOptions(
        num_microbatches=3, type="envelope", reconfigure="default", baseline_steps=1,
        profile_steps=1, window_s=0.1, output=root,
    )
    session, _ = plain_stages.session(rank, config, root, fast=False, seen_as=opened)
    for _ in range(4):
        session.run_iteration(
            3, plain_stages.SPECS, lambda schedule: plain_stages.PlainWork(schedule, rank)
        )
    session.close()
    summary = session.clock.summary()
    found = [summary["backend"], summary["error"], session.parts.meter.last_refresh_s > 0]
    (root / f"found-{rank}").write_text(json.dumps(found))

sys.exit(run_forked(2, train, Path(sys.argv[1])))
"""

COMMANDS = """
import json, sys
from click.testing import CliRunner
from envpipe_megatron.cli import main
results = [CliRunner().invoke(main, words.split()) for words in sys.argv[1:]]
print(json.dumps([[result.exit_code, result.stdout, result.stderr] for result in results]))
"""


class Acme:
    """Its package is installed for the programs that this runs, and its driver has two cards."""

    def __init__(self, folder, environment):
        self._folder, self._environment = folder, environment
        installed = folder / "installed"
        info = installed / "acme-1.0.dist-info"
        info.mkdir(parents=True)
        (installed / "acme_gpus.py").write_text(CODE)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[envpipe_megatron.gpu_backends]\nacme = acme_gpus:AcmeGpu\n"
            "broken = acme_gpus:not_there\nnvml = acme_gpus:not_there\nodd = acme_gpus:__name__\n"
        )
        self.says()

    def says(self, **more):
        state = {"version": "7.1", "cards": ["acme.a", "acme.b"], "granted": True, "sealed": []}
        (self._folder / "driver").write_text(json.dumps({**state, **more}))

    def told(self):
        """Return what the driver was asked since the last call, without by whom."""
        log = self._folder / "driver.told"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line.split(" ", 1)[1] for line in lines]

    def run(self, program, *arguments):
        paths = (self._folder / "installed", REPOSITORY, REPOSITORY / "tests" / "helpers")
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={
                **os.environ,
                **self._environment,
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "ACME_DRIVER": str(self._folder / "driver"),
                "ENVPIPE_LEASE_DIR": str(self._folder / "leases"),
                "XDG_RUNTIME_DIR": str(self._folder),
                "COLUMNS": "200",
            },
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done

    def commands(self, *words):
        return json.loads(self.run(COMMANDS, *words).stdout.splitlines()[-1])


@pytest.fixture
def acme(fake_nvml, tmp_path):
    fake_nvml.set_fault(None, "driver_not_loaded")  # this machine's own GPUs are not to be seen
    tmp_path.chmod(0o700)
    return Acme(tmp_path, fake_nvml.environment)


def test_commands_list_and_reset_its_cards(acme):
    (_, found, _), shown, reset = acme.commands("doctor --json", "clocks show", "clocks reset")
    checks = {check["name"]: check for check in json.loads(found)["checks"]}
    for name, said in (
        ("driver", "driver 7.1"),
        ("GPUs", "2 x Acme One"),
        ("no GPU refuses locks", "none does"),
        ("supported clocks", "600 to 900 MHz in steps of 100 MHz, 4 clocks, on 2 GPUs"),
        ("energy counter", "on all, and it moves"),
        ("back end acme", "the group acme may lock 2 cards"),
        ("auto", "takes acme"),
        ("CUDA_VISIBLE_DEVICES", "0: acme.a, 1: acme.b"),
    ):
        assert checks[name]["ok"], checks[name]
        assert said in checks[name]["evidence"]
    assert "none of its GPUs is here" in checks["back end nvml"]["evidence"]
    for name in ("broken", "odd"):
        assert "cannot be imported" in checks[f"back end {name}"]["evidence"]
    assert shown[0] == 0
    for said in ("GPU 1: Acme One", "acme.b", "600 to 900 MHz in steps of 100 MHz", "100.0 W"):
        assert said in shown[1]
    assert reset[0] == 0
    assert "GPU 0 (acme.a): reset by acme" in reset[1]
    assert acme.told() == ["acme.a reset", "acme.b reset"]


def test_what_it_refuses_is_said_and_nothing_is_changed(acme):
    acme.says(granted=False)
    doctor, reset = acme.commands("doctor", "clocks reset --gpu acme.b")
    assert "this user is not in the group acme" in doctor[1]
    assert reset[0] == 1
    assert "acme: this user is not in the group acme" in reset[1]
    acme.says(granted="perhaps")
    (doctor,) = acme.commands("doctor")
    assert "it failed: ZeroDivisionError" in doctor[1]
    acme.says(sealed=["acme.b"])
    doctor, reset = acme.commands("doctor", "clocks reset")
    assert "GPU 1: The card is sealed" in doctor[1]
    assert (reset[0], acme.told()) == (0, ["acme.a reset"])
    assert "GPU 1 (acme.b): left as it is: The card is sealed" in reset[1]


def test_a_session_sets_its_clocks_and_gives_them_back(acme, tmp_path):
    acme.run(SESSION, str(tmp_path))
    for rank in range(2):
        assert json.loads((tmp_path / f"found-{rank}").read_text()) == ["acme", None, True]
    told = acme.told()
    for uid in ("acme.a", "acme.b"):
        of_card = [what for card, what in map(str.split, told) if card == uid]
        assert "900" in of_card
        assert of_card[-1] == "reset"
    assert not list((tmp_path / "leases").iterdir())
