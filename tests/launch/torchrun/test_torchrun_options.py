"""What torchrun is told: what was given, and what variables and SLURM say of the rest."""

import os
import sys
from itertools import chain
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.hosts import Host
from envpipe_megatron.launch.options import NAMES, options_here, options_of_hosts, read, split

OWN_OPTIONS = {"--output": True, "--dry-run": False}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "rack1node[03,07-09]",
    "SLURM_JOB_NODELIST": "rack1node[01-09]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "8",
}
TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first"}


def here(*words, gpus=0, port=None, **environ):
    """Return what torchrun gets, whose own default of the master's port is `port`."""

    def with_port():
        parser = get_args_parser()
        parser.set_defaults(master_port=port)
        return parser

    with (
        patch.dict(os.environ, environ),
        patch("torch.cuda.device_count", lambda: gpus),
        patch("torch.distributed.run.get_args_parser", with_port),
    ):
        return options_here(split(words))


def options(plan):
    return plan.arguments[: plan.arguments.index("--")]


def origins(plan):
    return {option: origin for option, (_, origin) in plan.settings.items()}


def refused(*words, **environ):
    with pytest.raises(EnvPipeError) as error:
        here(*words, **environ)
    return str(error.value)


# The split


def every_option():
    """Each of torchrun's options by each of its names, with a value where it takes one."""
    parser = get_args_parser()
    for action in parser._actions:
        for name in action.option_strings:
            # These two print and exit.
            if action.dest not in ("help", "print_completion"):
                value = str(next(iter(action.choices))) if action.choices else "1"
                yield [name] if action.nargs == 0 else [name, value]


OWN = st.sampled_from([["--output", "out"], ["--output=x=y"], ["--dry-run"], ["--output", "-1"]])
TORCHRUNS = st.sampled_from(
    [*every_option(), ["--nnodes=2"], ["-r3"], ["--max_restarts=3"], ["--nn", "2"], ["--stand"]]
)
ANYTHING = st.sampled_from(["--output", "out", "--nnodes", "--", "-m", "--max", "--no", "", "a b"])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), OWN, TORCHRUNS)),
    st.booleans(),
    st.lists(ANYTHING),
)
def test_options_of_both_may_be_mixed_and_the_scripts_are_its_own(mixed, dashes, arguments):
    words = list(chain(*(own if is_own else torchruns for is_own, own, torchruns in mixed)))
    line = split([*words, *["--"] * dashes, "train.py", *arguments], OWN_OPTIONS)
    assert line == (tuple(words), ("train.py", *arguments))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ouput", "x", "train.py", "--n", "3"], "unrecognized arguments: --ouput"),
        (["--output"], "--output: expected one argument"),
        (["--output", "--nnodes", "2", "train.py"], "--output: expected one argument"),
        (["--nnodes"], "--nnodes: expected one argument"),
        (["--max-restarts", "few", "train.py"], "--max-restarts"),
        (["--start-method=none", "train.py"], "--start-method"),
        (["--nnodes", "2"], "required: training_script"),
        (["--nnodes", "2", "--help", "train.py", "--n", "3"], "There is no help"),
        (["--nnodes", "2", "--help"], "See `envpipe launch --help` and `torchrun --help`"),
    ],
)
def test_bad_options_are_named(words, message):
    with pytest.raises(EnvPipeError, match=message):
        split(words, OWN_OPTIONS)


def test_torch_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.run", None)
    with pytest.raises(EnvPipeError, match=r"torch.*pip install"):
        read(["train.py"])


def test_a_bad_flag_among_torchruns_variables_is_no_traceback(monkeypatch):
    monkeypatch.setenv("PET_STANDALONE", "yes")
    with pytest.raises(EnvPipeError, match="PET_STANDALONE"):
        read(["train.py"])


# Where values come from


@pytest.mark.parametrize("name", NAMES)
def test_the_order_in_which_values_count(name):
    option, variable = "--" + name.replace("_", "-"), name.upper()
    value = {"nnodes": "3", "node_rank": "2"}.get(name, "5")
    at_least = {"NNODES": "9", "NODE_RANK": "1", "MASTER_ADDR": "n", "MASTER_PORT": "7"}
    environ = SLURM | at_least | {variable: value, f"PET_{variable}": value}

    for spelled in (option, f"--{name}"):
        plan = here(f"{spelled}=4", "train.py", **environ)
        assert str(getattr(plan.read, name)) == "4"
        assert option not in origins(plan)
    for origin in (f"PET_{variable}", variable):
        plan = here("train.py", **environ)
        assert origins(plan)[option] == origin
        assert str(getattr(plan.read, name)) == value
        del environ[origin]
    plan = here("train.py", **environ)
    assert origins(plan)[option].startswith("SLURM_")
    assert f"{option}={getattr(plan.read, name)}" in options(plan)


def test_empty_variables_are_unset():
    plan = here("train.py", **dict.fromkeys([name.upper() for name in NAMES], ""), SLURM_JOB_ID="")
    assert origins(plan) == {"--nproc-per-node": "default"}


@pytest.mark.parametrize(("gpus", "processes"), [(0, "1"), (8, "gpu")])
@pytest.mark.parametrize(
    "environ",
    [{}, {"SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "8"}],  # the latter without a job
)
def test_processes_by_default(gpus, processes, environ):
    plan = here("train.py", gpus=gpus, **environ)
    assert options(plan) == (f"--nproc-per-node={processes}",)
    no_gpus = here("train.py", gpus=gpus, **SLURM | {"SLURM_GPUS_ON_NODE": "0"})
    assert no_gpus.read.nproc_per_node == processes
    told = refused("train.py", **SLURM | {"SLURM_GPUS_ON_NODE": "a100:8"})
    assert "--nproc-per-node (or SLURM_GPUS_ON_NODE) is not a number from 1" in told


@pytest.mark.parametrize(
    ("name", "good", "bad", "message"),
    [
        ("NODE_RANK", ["0", "1"], ["2", "-1"], "NODE_RANK"),
        ("NODE_RANK", [], ["one"], "--node-rank"),
        ("MASTER_PORT", ["1"], ["http"], "--master-port"),
        ("NPROC_PER_NODE", ["1", "auto"], ["0", "8 GPUs", "two"], "NPROC_PER_NODE"),
        ("NNODES", ["2", "1:2"], ["0", "two", "-2", "2:x", ":2"], "NNODES"),
    ],
)
def test_wrong_numbers_of_nodes_and_processes_are_named(name, good, bad, message):
    for value in good:
        assert (
            str(getattr(here("train.py", **TWO_NODES | {name: value}).read, name.lower())) == value
        )
    for value in bad:
        told = refused("train.py", **TWO_NODES | {name: value})
        assert message in told
        assert value in told


def test_a_wrong_number_of_nodes_of_a_standalone_start_is_named(monkeypatch):
    monkeypatch.setenv("PET_NNODES", "two")  # which torchrun's parser reads itself
    assert "--nnodes (or NNODES) is not a number" in refused("--standalone", "train.py")


@pytest.mark.parametrize("missing", ["NODE_RANK", "MASTER_ADDR"])
def test_several_nodes_must_know_each_other(missing):
    environ = {name: value for name, value in TWO_NODES.items() if name != missing}
    message = refused("train.py", **environ)
    assert missing in message
    assert "2 nodes" in message


@pytest.mark.parametrize("words", [[], ["--nnodes=1"], ["--nnodes", "1:1"]])
def test_one_node_is_not_looked_for_at_a_place_among_others(words):
    """Batch systems set it: the job ended, or waited a quarter of an hour for another node."""
    place = {"NODE_RANK": "3", "MASTER_ADDR": "first", "MASTER_PORT": "29511"}
    plan = here(*words, "train.py", **place)
    assert origins(plan).keys() == {"--nproc-per-node", "--master-port"}
    assert plan.read.node_rank == 0
    own = on_hosts("train.py", hosts=HOSTS[:1], **place)[0].read
    assert (own.node_rank, own.master_addr) == (0, "one")
    assert here(*words, "train.py", PET_MASTER_ADDR="own", **place).read.master_addr == "own"


# The rendezvous


def test_standalone_is_left_alone():
    plan = here("--standalone", "train.py", NPROC_PER_NODE="3", **TWO_NODES, **SLURM)
    assert options(plan) == ("--nproc-per-node=3", "--standalone")
    assert here("--standalone", "train.py", PET_NODE_RANK="1").read.standalone
    assert options(here("train.py", PET_STANDALONE="1", **TWO_NODES)) == ("--nproc-per-node=1",)
    assert "--node-rank=1" in options(here("train.py", PET_STANDALONE="0", **TWO_NODES))


def test_a_rendezvous_of_the_users_is_left_alone():
    given = ("--rdzv-backend", "c10d", "--rdzv_endpoint=first:29400")
    plan = here(*given, "train.py", NPROC_PER_NODE="3", **TWO_NODES)
    assert options(plan) == ("--nproc-per-node=3", "--nnodes=2", *given)
    plan = here("train.py", PET_RDZV_BACKEND="c10d", PET_RDZV_ENDPOINT="a:1", **TWO_NODES)
    assert options(plan) == ("--nproc-per-node=1", "--nnodes=2")


def test_a_rendezvous_without_an_endpoint_is_at_the_master():
    """Each of several nodes held it for itself, and waited for the others for ten minutes."""
    c10d = "--rdzv-backend=c10d"
    for environ, place in ((TWO_NODES, "first"), (SLURM, "rack1node03:24340")):
        plan = here(c10d, "train.py", **environ)
        assert options(plan)[1:] == ("--nnodes=2", f"--rdzv-endpoint={place}", c10d)
    plan = here(c10d, "--master-addr=a", "--master-port=7", "train.py", **TWO_NODES)
    assert plan.read.rdzv_endpoint == "a:7"
    for port, endpoint in (("", "[fd00::2]"), ("7", "[fd00::2]:7")):  # else torchrun's port is 2
        plan = here(c10d, "train.py", **{**TWO_NODES, "MASTER_ADDR": "fd00::2"}, MASTER_PORT=port)
        assert plan.read.rdzv_endpoint == endpoint
    for words in ([], ["--nnodes=1"], ["--standalone"]):  # one node
        assert not here(c10d, *words, "train.py", MASTER_ADDR="first").read.rdzv_endpoint
    assert [plan.read.rdzv_endpoint for plan in on_hosts(c10d, "train.py")] == ["one", "one"]
    with pytest.raises(EnvPipeError, match=r"by --rdzv-endpoint of MASTER_ADDR \(got 'localhost:7"):
        on_hosts(c10d, "train.py", MASTER_ADDR="localhost", MASTER_PORT="7")
    with pytest.raises(EnvPipeError, match=r"by --rdzv-endpoint of MASTER_ADDR \(got '\[::1\]'"):
        on_hosts(c10d, "train.py", MASTER_ADDR="::1")


def test_an_endpoint_takes_the_masters_place_and_no_ranks():
    plan = here("--rdzv-endpoint=first:29400", "train.py", **TWO_NODES)
    assert options(plan)[:-1] == ("--nproc-per-node=1", "--nnodes=2", "--node-rank=1")
    for word in ("--rdzv-conf=timeout=900", "--rdzv-backend=static"):
        plan = here(word, "train.py", **TWO_NODES)
        assert options(plan)[-3:-1] == ("--node-rank=1", "--master-addr=first")


# SLURM


def test_slurms_step_fills_everything_in():
    plan = here("train.py", **SLURM)
    assert plan.settings == {
        "--nproc-per-node": ("8", "SLURM_GPUS_ON_NODE"),
        "--nnodes": ("2", "SLURM_STEP_NUM_NODES"),
        "--node-rank": ("1", "SLURM_NODEID"),
        "--master-addr": ("rack1node03", "SLURM_STEP_NODELIST"),
        "--master-port": ("24340", "SLURM_JOB_ID"),
    }


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a-1,b-2", "a-1"),
        ("node[001-016,020]", "node001"),
        ("node[7,9],gpu1", "node7"),
        ("rack[2-3]node[10-11]-ib,x", "rack2node10-ib"),
    ],
)
def test_slurms_first_host(hosts, first):
    plan = here("train.py", **SLURM | {"SLURM_STEP_NODELIST": hosts})
    assert plan.read.master_addr == first


@pytest.mark.parametrize("hosts", ["node[", "node[a]", ",a", "[]", "node]"])
def test_a_list_that_is_none_of_slurms(hosts):
    message = refused("train.py", **SLURM | {"SLURM_STEP_NODELIST": hosts})
    assert "SLURM_STEP_NODELIST" in message
    assert "--master-addr" in message


@pytest.mark.parametrize("step", [None, "", "4294967290", "4294967291"])
def test_the_batch_script_of_several_nodes_is_refused(step):
    environ = {name: value for name, value in SLURM.items() if "STEP" not in name}
    environ["SLURM_NNODES"] = "2"
    if step is not None:
        environ["SLURM_STEP_ID"] = step
    message = refused("train.py", **environ)
    assert "2 nodes" in message
    assert "srun --ntasks-per-node=1" in message
    assert here("--nnodes=1", "train.py", **environ).read.nnodes == "1"
    assert here("--standalone", "train.py", **environ).read.standalone


@pytest.mark.parametrize("tasks", ["2(x2)", "1,8", "12"])
def test_several_tasks_on_a_node_are_refused(tasks):
    message = refused("train.py", **SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks})
    assert f"(SLURM_STEP_TASKS_PER_NODE) (got '{tasks}')" in message
    for right in ("1", "1(x12)", "1,1(x2)"):
        assert here("train.py", **SLURM | {"SLURM_STEP_TASKS_PER_NODE": right}).read.nnodes == "2"


def test_a_place_among_nodes_that_slurm_does_not_count_is_no_rank():
    environ = {name: value for name, value in SLURM.items() if "NODES" not in name}
    assert "NODE_RANK" in refused("--nnodes=2", "train.py", **environ)
    assert here("--nnodes=2", "train.py", **SLURM).read.node_rank == 1


def test_slurms_first_node_has_rank_0_and_one_without_a_rank_is_refused():
    assert here("train.py", **SLURM | {"SLURM_NODEID": "0"}).read.node_rank == 0
    assert "NODE_RANK" in refused("train.py", **SLURM | {"SLURM_NODEID": ""})
    assert "MASTER_ADDR" in refused(
        "train.py", **SLURM | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}
    )


def test_jobs_and_steps_of_a_node_get_ports_of_their_own():
    def port(job, step):
        environ = SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        return here("train.py", **environ).read.master_port

    ports = [port(job, step) for job in range(19_999_000, 19_999_040) for step in (0, 3, 9)]
    assert len(set(ports)) == len(ports)
    assert min(ports) > 1023
    assert max(ports) < 32768  # from here on, Linux gives ports to outgoing connections


@pytest.mark.parametrize("port", [None, 29500])
def test_one_node_of_slurm_meets_at_a_free_port(port):
    # torch 2.11 takes port 29500, where two jobs of a node would meet.
    alone = {name: value for name, value in SLURM.items() if "STEP" not in name}
    plan = here("train.py", port=port, **alone | {"SLURM_NNODES": "1"})
    expected = ["--nproc-per-node=8", "--nnodes=1"]
    assert options(plan) == (*expected, *([] if port is None else ["--master-port=24340"]))


# Hosts

HOSTS = (Host("me@one", 2, "hosts:1"), Host("two", 3, "hosts:2"))


def on_hosts(*words, hosts=HOSTS, **environ):
    with patch.dict(os.environ, environ):
        return options_of_hosts(split(words), hosts)


def test_the_command_line_is_stronger_than_slots():
    plans = on_hosts(
        "--nproc_per_node", "4", "--master-addr=ib", "train.py", MASTER_ADDR="x", MASTER_PORT="7",
        NNODES="7", NODE_RANK="5", NPROC_PER_NODE="9",
    )  # fmt: skip
    assert origins(on_hosts("train.py")[1])["--nproc-per-node"] == "hostfile"
    for rank, plan in enumerate(plans):
        assert options(plan) == (
            "--nnodes=2", f"--node-rank={rank}", "--master-port=7", "--nproc_per_node", "4",
            "--master-addr=ib",
        )  # fmt: skip


def test_hosts_without_slots():
    hosts = (Host("one", None, "hosts:1"),)
    with pytest.raises(EnvPipeError, match=r"hosts:1: the host has no slots.*--nproc-per-node"):
        on_hosts("train.py", hosts=hosts)
    assert "--nproc-per-node=4" in options(on_hosts("train.py", hosts=hosts, NPROC_PER_NODE="4")[0])


def test_a_first_host_that_each_would_look_for_on_itself():
    """They waited for a quarter of an hour."""
    own, other = (Host("me@localhost", 2, "hosts:1"), Host("127.0.0.2", 2, "hosts:2")), HOSTS[1]
    with pytest.raises(EnvPipeError, match=r"on itself, by --master-addr of hostfile \(got 'local"):
        on_hosts("train.py", hosts=(own[0], other))
    with pytest.raises(EnvPipeError, match=r"on itself, by --master-addr of MASTER_ADDR"):
        on_hosts("train.py", MASTER_ADDR="127.0.0.1")
    with pytest.raises(EnvPipeError, match=r"on itself, by --master-addr of the command line"):
        on_hosts("--master-addr=localhost", "train.py")
    with pytest.raises(EnvPipeError, match=r"on itself, by --master-addr of MASTER_ADDR"):
        on_hosts("train.py", hosts=(other, own[0]), MASTER_ADDR="127.0.0.1")
    for hosts in (own[:1], own, (other, own[0])):
        on_hosts("train.py", hosts=hosts)
    for hosts in (HOSTS[:1], own):
        on_hosts("--rdzv-backend=c10d", "train.py", hosts=hosts)
    on_hosts("--master-addr", "one", "train.py", hosts=(own[0], other))
    on_hosts("--rdzv-backend=c10d", "--rdzv-endpoint=one", "train.py", hosts=(own[0], other))


@pytest.mark.parametrize("endpoint", ["localhost", "127.0.0.1:29500", "[::1]:29400", "localhost:"])
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_rendezvous_that_each_host_would_hold_for_itself(endpoint, backend):
    """They waited for ten minutes."""
    wanted = r"on itself, by --rdzv-endpoint of the command line or a PET_"
    with pytest.raises(EnvPipeError, match=wanted):
        on_hosts(f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", "train.py")
    with pytest.raises(EnvPipeError, match=wanted):
        on_hosts("train.py", PET_RDZV_BACKEND=backend, PET_RDZV_ENDPOINT=endpoint)
    on_hosts("--rdzv-backend=etcd-v2", f"--rdzv-endpoint={endpoint}", "train.py")  # a member each


@pytest.mark.parametrize(
    ("words", "environ", "named"),
    [
        (["--standalone"], {}, "--standalone"),
        ([], {"PET_STANDALONE": "1"}, "--standalone"),
        ([], {"MASTER_PORT": "x"}, "--master-port"),
    ],
)
def test_what_does_not_go_with_hosts(words, environ, named):
    with pytest.raises(EnvPipeError, match=named):
        on_hosts(*words, "train.py", **environ)
