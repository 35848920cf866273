"""What is run, a training job of a checkout: its command, its environment, and what is done."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.megatron_lm.models import CPU_RUN, ROOT, Planned
from benchmarks.megatron_lm.running.entry import die_with_parent
from envpipe_megatron.gpu.base import FORBID_VARIABLE

#: Back ends that change no clock of a GPU.
HARMLESS = ("dry_run", "emulated")
#: With Transformer Engine, two runs of the same job differ without.
DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


class HarmfulError(Exception):
    """A run that might change a clock."""


@dataclass(frozen=True)
class Site:
    """Where jobs run.

    Args:
        stock: an unmodified checkout.
        patched: the same one with the patch.
        scratch: folder for logs and checkpoints; the socket's path, so a short one.
        cpu: on gloo and emulated GPUs, through tests/megatron_lm/cpu_run.py.
        corpus: folder of a corpus by tests/megatron_lm/make_corpus.py.
        channel: what carries messages under EnvPipe, one of `channel_model.CARRIERS`.
        has: modules that settings may need and that are installed.
        ranks_per_gpu: above 1, ranks share GPUs by benchmarks/shared_gpu.py.
    """

    stock: Path
    patched: Path
    scratch: Path
    cpu: bool
    num_gpus: int
    corpus: Path | None = None
    channel: str = "auto"
    has: frozenset[str] = frozenset()
    ranks_per_gpu: int = 1

    @property
    def num_ranks(self) -> int:
        """How many a job may have."""
        return self.num_gpus * self.ranks_per_gpu

    @property
    def control(self) -> str:
        """The back end that every run gets."""
        return "emulated" if self.cpu else "dry_run"


@dataclass(frozen=True)
class Job:
    """One run of pretrain_gpt.py, or of another script on ranks that take turns.

    Args:
        name: part/setting/arm.
        arguments: of the script; `{folder}` is the job's own folder; `{scratch}`, `{corpus}` and
            `{control}` are the site's.
        iterations: how often the train step is called.
        turns: iterations of each turn, where an order of turns is kept.
        environment: beyond what every job gets; None unsets a variable.
        after: the job that must have gone well before.
        plan: whose files it needs in its folder.
        stress: settings of `stress`.
        mark_norms: let Megatron take torch's norms for sequence parallelism, as the tests on the
            CPU do; without Apex and Transformer Engine it has no others.
        rests: whether EnvPipe rests in every other turn (`rest`).
        entry: the script of each rank, in this checkout; it gets the job's file and the arguments.
    """

    name: str
    arguments: tuple[str, ...]
    num_ranks: int
    iterations: int
    patched: bool
    turns: tuple[int, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    after: str | None = None
    plan: Planned | None = None
    stress: Mapping[str, Any] | None = None
    mark_norms: bool = False
    rests: bool = False
    limit_s: float = 300.0
    entry: str = "benchmarks/megatron_lm/running/entry.py"

    @property
    def identity(self) -> str:
        """Another for a job that does anything else; the same wherever it runs."""
        text = json.dumps(asdict(self), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def folder_name(self) -> str:
        """Of the job's own folder, in the site's scratch."""
        return self.name.replace("/", ".")

    def folder(self, site: Site) -> Path:
        """The job's own folder."""
        return site.scratch / self.folder_name


class State:
    """What was found so far, written at every change.

    Attributes:
        runs: for each job's name how it ended, its command, and what its ranks reported.
        rounds: each a set of blocks that are compared with each other, an arm each.
        machine: what the runs were made on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        known = json.loads(path.read_text()) if path.exists() else {}
        self.runs: dict[str, dict[str, Any]] = known.get("runs", {})
        self.rounds: list[dict[str, Any]] = known.get("rounds", [])
        self.machine: dict[str, Any] = known.get("machine", {})

    def done(self, job: Job) -> bool:
        """Whether this very job ended as it should."""
        run = self.runs.get(job.name)
        return run is not None and run["identity"] == job.identity and run["status"] == "ok"

    def keep(self, job: Job, **found: Any) -> None:
        """Record how a job ended."""
        self.runs[job.name] = {"identity": job.identity, **found}
        self.save()

    def save(self) -> None:
        """Replace the file in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        data = {"runs": self.runs, "rounds": self.rounds, "machine": self.machine}
        draft.write_text(json.dumps(data, separators=(",", ":")))
        draft.replace(self.path)


@dataclass(frozen=True)
class Launch:
    """How a job is started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]

    def start(self, folder: Path, log: Path) -> subprocess.Popen[bytes]:
        """Start it in a folder, so that it ends with us."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self.command,
                cwd=folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def shown(self) -> str:
        """The command as one may type it."""
        kept = (FORBID_VARIABLE, "CUDA_DEVICE_MAX_CONNECTIONS", *DETERMINISTIC)
        variables = [
            f"{name}={self.environment[name]}" for name in kept if name in self.environment
        ]
        return " ".join([*variables, *self.command])


def make_launch(job: Job, site: Site, socket_path: Path) -> Launch:
    """Write a job's files into its folder; raise HarmfulError if it might change a clock."""
    folder = job.folder(site)
    checkout = (site.patched if job.patched else site.stock).resolve()
    description = {
        "run": job.name,
        "script": str(checkout / "pretrain_gpt.py"),
        "folder": str(folder),
        "socket": str(socket_path),
        "turns": job.turns,
        "iterations": job.iterations,
        "stress": job.stress,
        "rests": job.rests,
        "cpu_run": str(CPU_RUN) if site.cpu else None,
        "mark_norms": str(CPU_RUN) if job.mark_norms and not site.cpu else None,
    }
    (folder / "job.json").write_text(json.dumps(description))
    if job.plan is not None:
        job.plan.write(folder)
    arguments = [
        argument.format(
            folder=folder, scratch=site.scratch, corpus=site.corpus, control=site.control
        )
        for argument in job.arguments
    ]
    if "--envpipe" in arguments:
        arguments += ["--envpipe-channel", site.channel]
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", str(job.num_ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    # Together, the ranks would write into each other's lines.
    command += ["--redirects", "3", "--log-dir", str(folder / "ranks")]
    if site.ranks_per_gpu > 1:
        command += [str(ROOT / "benchmarks" / "shared_gpu.py"), str(site.ranks_per_gpu)]
    command += [str(ROOT / job.entry), str(folder / "job.json"), *arguments]
    launch = Launch(tuple(command), _environment(job, site))
    check_harmless(launch)
    return launch


def check_harmless(launch: Launch) -> None:
    """Raise HarmfulError for what might change a clock."""
    if launch.environment.get(FORBID_VARIABLE) != "1":
        raise HarmfulError(f"{FORBID_VARIABLE} is not 1")
    flags = [part for part in launch.command if re.match(r"--envpipe($|[-=])", part)]
    controls = [
        (flag, value)
        for flag, value in itertools.pairwise([*launch.command, ""])
        if flag.partition("=")[0] == "--envpipe-gpu-control"
    ]
    if flags and controls not in [[("--envpipe-gpu-control", name)] for name in HARMLESS]:
        raise HarmfulError(f"The clock control is {controls}, not one of {HARMLESS}")


def _environment(job: Job, site: Site) -> dict[str, str]:
    emulated = {
        "ENVPIPE_EMULATED_GPU": "h200",
        "ENVPIPE_EMULATED_FORWARD_S": "0.004",
        "ENVPIPE_EMULATED_ROOT": str(job.folder(site) / "gpus"),
    }
    variables: dict[str, str | None] = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ENVPIPE_")},
        FORBID_VARIABLE: "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        # 32 processes that compile at once, each with 32 workers, would be a thousand.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
        "CUDA_DEVICE_MAX_CONNECTIONS": None,
        **(emulated if site.cpu else {}),
        **job.environment,
    }
    return {name: value for name, value in variables.items() if value is not None}


#: Below those that the kernel hands out: between the choice and the use, one of these would go to a
#: connection of another job. In an order that no other process of ours is likely to have.
_PORTS = itertools.cycle(random.sample(range(15000, 30000), 15000))


def _free_port() -> int:
    """A port that nobody has, and another each time."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a cycle does not end")


def prepare(checkout: Path) -> None:
    """Compile a checkout's dataset helpers and its modules; nothing that Git follows is changed."""
    if not (checkout / "pretrain_gpt.py").is_file():
        raise click.ClickException(f"{checkout} holds no pretrain_gpt.py")
    datasets = checkout / "megatron" / "core" / "datasets"
    if (datasets / "helpers.cpp").is_file():
        made = datasets / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
        if not made.exists():
            _compile(datasets / "helpers.cpp", made)
        # Where Megatron's Makefile calls it by another name, that is made once, too.
        if shutil.which("make"):
            subprocess.run(["make", "-C", str(datasets)], capture_output=True, check=False)
    # Another process, whose workers inherit that warnings are ignored.
    modules = [sys.executable, "-W", "ignore", "-m", "compileall", "-qq", "-j", "0"]
    subprocess.run([*modules, str(checkout / "megatron")], check=False)


def _compile(source: Path, target: Path) -> None:
    """As Megatron's Makefile does, for this very interpreter.

    Megatron runs `make` at each start: it finds the target newer than its source and does nothing.
    """
    includes = subprocess.run(
        [sys.executable, "-m", "pybind11", "--includes"], capture_output=True, text=True
    )
    command = ["g++", "-O3", "-Wall", "-shared", "-std=c++17", "-fPIC", *includes.stdout.split()]
    made = subprocess.run(
        [*command, str(source), "-o", str(target)], capture_output=True, text=True
    )
    if made.returncode:
        raise click.ClickException(
            f"Megatron's dataset helpers cannot be compiled: {includes.stderr}{made.stderr[-2000:]}"
        )


def prepare_corpus(folder: Path, checkout: Path) -> bool:
    """Make the real corpus where it is not there yet; whether it is there then."""
    if not (folder / "corpus_text_document.bin").exists():
        script = CPU_RUN.with_name("make_corpus.py")
        command = [sys.executable, str(script), str(folder), str(checkout)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            click.echo(f"No real corpus could be made: {made.stderr[-2000:]}", err=True)
            return False
    return True


def modified(stock: Path, patched: Path) -> list[str]:
    """Names of Python files under megatron/ that differ between the two, or are in one alone."""
    names = {
        path.relative_to(root).as_posix()
        for root in (stock, patched)
        for path in root.glob("megatron/**/*.py")
    }

    def content(path: Path) -> bytes | None:
        return path.read_bytes() if path.is_file() else None

    return sorted(name for name in names if content(stock / name) != content(patched / name))
