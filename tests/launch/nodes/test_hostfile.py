import pytest

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.launch.hosts import Host, read_hostfile


def read(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "hosts"
    path.write_text(text, encoding=encoding)
    return read_hostfile(path)


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_other_encodings_are_told_what_to_do(tmp_path, encoding):
    with pytest.raises(EnvPipeError, match=r"hosts is not readable: .*save it as UTF-8"):
        read(tmp_path, "nöde slots=8\n", encoding)


@pytest.mark.parametrize(
    ("line", "target", "slots"),
    [
        ("node1:4", "node1", 4),  # MPICH, Intel MPI
        ("node1 max-slots=2", "node1", None),
        ("me@10.0.0.3:008 max_slots=16  # the old one", "me@10.0.0.3", 8),
        ("[fe80::1]:4", "fe80::1", 4),
        ("me@[fe80::1] slots=2", "me@fe80::1", 2),
        ("2001:db8::1:4 slots=2", "2001:db8::1:4", 2),
        ("[2001:db8::1:4]", "2001:db8::1:4", None),
    ],
)
def test_what_deepspeed_and_mpis_write(tmp_path, line, target, slots):
    (host,) = read(tmp_path, f"# two racks\n\n  {line}\n")
    assert host == Host(target, slots, f"{tmp_path}/hosts:3")
    assert host.name == target.rpartition("@")[2]


@pytest.mark.parametrize("text", ["", "\n", "# node1 slots=8\n"])
def test_no_host(tmp_path, text):
    with pytest.raises(EnvPipeError, match=r"hosts names no host.*slots=8"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *(
            (line, f"not a host and its number of processes (got '{line}')")
            for line in (
                "node slots=0", "node slots=", "node slots = 8", "node 8", "slots=8",
                # ssh would take it for an option, and run the command.
                "-oProxyCommand=reboot slots=8", "me@-oProxyCommand=reboot slots=8",
                "node;reboot slots=8", "@node slots=8",
                "node:0", "node:", ":4", "node:4:2", "[node]:4",
                "[fe80::1", "node:4 slots=4", "[::1]:4 slots=2", "node slots=4 slots=4",
                "fe80::1", "2001:db8::1:4",  # an address, or one with a number
                "me@node:2222", "node slots=1000",  # a port, by which 2,222 processes were started
            )
        ),
        ("first:2", "named before, at {path}:1"),
        ("first slots=1", "named before, at {path}:1"),
        ("me@FIRST slots=1", "named before, at {path}:1"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path, line, message):
    with pytest.raises(EnvPipeError) as error:
        read(tmp_path, f"first slots=2\n\n{line}\n")
    path = tmp_path / "hosts"
    assert str(error.value).startswith(f"{path}:3: ")
    assert message.format(path=path) in str(error.value)
