"""The site configuration: what it gives, and what it is refused for."""

import os
import subprocess
from pathlib import Path

import pytest

from envpipe_megatron.gpu import site as site_module
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.site import (
    SiteConfig,
    in_user_namespace,
    read_site,
    read_site_file,
)

WHOLE = """
format = "envpipe-site/1"
[gpu_control]
backends = ["command", "zeusd"]
zeusd_socket = "/somewhere/zeusd.sock"
lock_command = ["/usr/bin/sudo", "-n", "/opt/clock", "--gpu={uuid}", "{index}", "{mhz}"]
reset_command = ["/opt/clock", "reset", "{index}"]
command_time_limit_s = 3
reset_range_mhz = [210, 1410]
"""


def site_of(tmp_path, fields, header='format = "envpipe-site/1"\n[gpu_control]\n'):
    path = tmp_path / "site.toml"
    path.write_text(header + fields)
    path.chmod(0o644)
    return path


def refused(path):
    with pytest.raises(GpuError) as caught:
        read_site_file(path)
    return str(caught.value)


def test_all_fields(tmp_path):
    path = site_of(tmp_path, WHOLE, header="")
    assert read_site_file(path) == SiteConfig(
        path,
        ("command", "zeusd"),
        Path("/somewhere/zeusd.sock"),
        ("/usr/bin/sudo", "-n", "/opt/clock", "--gpu={uuid}", "{index}", "{mhz}"),
        ("/opt/clock", "reset", "{index}"),
        3.0,
        (210, 1410),
    )


def test_every_field_is_optional(tmp_path):
    path = site_of(tmp_path, "", header='format = "envpipe-site/1"\n')
    assert read_site_file(path) == SiteConfig(path)
    site = read_site_file(site_of(tmp_path, "reset_range_mhz = [3, 3]"))
    assert site.reset_range_mhz == (3, 3)
    assert site == SiteConfig(site.path, None, None, (), (), 10.0, reset_range_mhz=(3, 3))


@pytest.mark.parametrize(
    ("uid_map", "inside"),
    [("0 0 4294967295", False), ("0 1000 1", True), ("0 0 65536", True), (None, False)],
)
def test_a_user_namespace_is_known_by_its_map(monkeypatch, uid_map, inside):
    def read_text(path):
        assert str(path) == "/proc/self/uid_map"
        if uid_map is None:
            raise FileNotFoundError
        return f"         {uid_map}\n".replace(" ", "  ")

    monkeypatch.setattr(Path, "read_text", read_text)
    assert in_user_namespace() is inside


def test_where_the_file_is(tmp_path, monkeypatch):
    monkeypatch.setattr(site_module, "DEFAULT_SITE_PATH", tmp_path / "default.toml")
    assert read_site() == SiteConfig()
    site_of(tmp_path, "backends = []").rename(tmp_path / "default.toml")
    assert read_site().backends == ()
    monkeypatch.setenv("ENVPIPE_SITE_CONFIG", str(site_of(tmp_path, 'backends = ["nvml"]')))
    assert read_site().backends == ("nvml",)


def test_a_default_file_that_cannot_be_reached_is_not_passed_over(tmp_path, monkeypatch):
    """What it forbids would be allowed otherwise."""
    path = tmp_path / "default.toml"
    path.symlink_to(path)  # a loop: as little to be read as a folder without rights, and for root
    monkeypatch.setattr(site_module, "DEFAULT_SITE_PATH", path)
    with pytest.raises(GpuError, match=r"default\.toml"):
        read_site()


def test_a_named_file_that_is_missing_is_an_error_and_not_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("ENVPIPE_SITE_CONFIG", str(tmp_path / "gone.toml"))
    with pytest.raises(GpuError, match=r"gone\.toml.*ENVPIPE_SITE_CONFIG"):
        read_site()


PAIR = 'lock_command = ["/a", "{uuid}", "{mhz}"]\nreset_command = ["/a", "{uuid}"]\n'
ARGV = [  # of a lock command, and what is said of it
    ('"a", "{uuid}", "{mhz}"', "absolute path"),
    ('"/a", "{uuid}"', "{mhz}"),
    ('"/a", "{mhz}"', "{uuid} or {index}"),
    ('"/a", "{uuid}", "{mhz}", "{user}"', "braces"),
    ('"/a", "{uuid}", "{mhz}", "{"', "braces"),
    ('"/a", "{{uuid}}", "{mhz}"', "braces"),
    ('"/a", "\\u0000{uuid}", "{mhz}"', "NUL"),
]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('backends = "nvml"', ["backends", "a list, each a text", "'nvml'"]),
        ('zeusd_socket = "zeusd.sock"', ["zeusd_socket", "absolute"]),
        ('reset_command = ["/a", "{uuid}"]', ["lock_command", "missing"]),
        ('lock_command = ["/a", "{uuid}", "{mhz}"]', ["reset_command", "missing"]),
        *[(f"lock_command = [{argv}]", ["lock_command", said]) for argv, said in ARGV],
        (PAIR.replace('"/a", "{uuid}"]', '"/a", "all"]'), ["reset_command", "{uuid} or {index}"]),
        (PAIR.replace('"/a", "{uuid}"]', '"/a", "{mhz}"]'), ["reset_command", "braces", "{index}"]),
        ("command_time_limit_s = 0", ["command_time_limit_s", "above 0"]),
        *[
            (
                f"command_time_limit_s = {bad}",
                ["'command_time_limit_s'", "must be a number of at least 0"],
            )
            for bad in ("-1", "nan", "inf", "true", "'2'", "1e30")
        ],
        ("reset_range_mhz = [1410, 210]", ["reset_range_mhz", "lowest"]),
        *[
            (
                f"reset_range_mhz = {bad}",
                ["'reset_range_mhz'", "a list of 2, each a whole number of at least 3"],
            )
            for bad in (
                "1",
                "[1]",
                "[3, 4, 5]",
                "[0, 3]",
                "[true, 3]",
                "[3, 4.0]",
                "[210, 1410000]",
            )
        ],
        ("allow_power_profiles = 1", ["'allow_power_profiles'", "must be true or false"]),
        ("backend = []", ["unknown field (got 'backend')", "Known", "backends"]),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path, fields, said):
    path = site_of(tmp_path, fields)
    message = refused(path)
    for part in (f"{path}/gpu_control: ", *said):
        assert part in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "field 'format'"),
        (
            'format = "envpipe-site/1"\ngpu_control = 3',
            "'gpu_control' is wrong (got 3). It must be an object",
        ),
        ('format = "envpipe-site/1"\nextra = 3', "unknown field (got 'extra')"),
        ("format = ", "not TOML"),
        (f"format = {'[' * 9999}", "not TOML"),
    ],
)
def test_a_file_that_is_no_site_configuration(tmp_path, text, said):
    path = site_of(tmp_path, text, header="")
    message = refused(path)
    assert str(path) in message
    assert said in message


@pytest.mark.parametrize("mode", [0o646, 0o664])
def test_a_file_that_others_may_write_is_refused(tmp_path, mode):
    path = site_of(tmp_path, PAIR)
    assert read_site_file(path).lock_command
    path.chmod(mode)
    assert "chmod go-w" in refused(path)


def test_root_takes_no_commands_from_another_users_file(tmp_path, monkeypatch):
    path = site_of(tmp_path, PAIR)
    stranger = path.stat().st_uid + 1000
    status = list(path.stat())
    status[4] = stranger
    monkeypatch.setattr(os, "fstat", lambda descriptor: os.stat_result(status))
    monkeypatch.setattr(os, "geteuid", lambda: stranger + 1)
    assert read_site_file(path).lock_command  # an unprivileged user may trust whom they like
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(site_module, "in_user_namespace", lambda: True)
    message = refused(path)
    assert "another user" in message
    assert "chown root" in message
    # The machine's root, as a namespace's root sees it; elsewhere that user is nobody's.
    status[4] = 65534
    assert read_site_file(path).lock_command
    monkeypatch.setattr(site_module, "in_user_namespace", lambda: False)
    assert "another user" in refused(path)
    status[4] = 0
    assert read_site_file(path).lock_command


# --- the examples --------------------------------------------------------------------------------

EXAMPLES = Path(__file__).resolve().parents[2] / "configs" / "site"
UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"


def test_the_example_is_a_site_configuration(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text((EXAMPLES / "site.toml").read_text())
    path.chmod(0o644)
    site = read_site_file(path)
    assert site.backends == ("zeusd", "command")
    assert site.lock_command[-4:] == ("/usr/local/sbin/gpu-clock", "lock", "{uuid}", "{mhz}")
    assert site.command_time_limit_s > 9  # the script gives up after that at the latest


@pytest.fixture
def gpu_clock(tmp_path):
    """Runs the example script, with an nvidia-smi that says what it is called with."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    smi.chmod(0o755)
    script = (EXAMPLES / "gpu-clock").read_text()
    fixed = "PATH=/usr/sbin:"
    assert fixed in script  # nobody's PATH decides which nvidia-smi root runs
    script = script.replace(fixed, f"PATH={tmp_path}:{fixed.removeprefix('PATH=')}")

    def run(*arguments):
        command = ["/bin/sh", "-c", script, "gpu-clock", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout.split()

    return run


def test_the_example_script_locks_and_resets_one_gpu(gpu_clock):
    assert gpu_clock("lock", UUID, "1200") == (0, ["-i", UUID, "--lock-gpu-clocks=1200,1200"])
    assert gpu_clock("reset", UUID) == (0, ["-i", UUID, "--reset-gpu-clocks"])


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("lock", UUID),
        ("lock", UUID, "1200,1410"),
        ("lock", UUID, "1200", "more"),
        ("lock", UUID, "$(touch injected)"),
        ("lock", "0", "1200"),
        ("lock", f"{UUID},GPU-2", "1200"),
        ("reset", UUID, "1200"),
        ("reset", "GPU-$(touch inject)-ed89-abcd-ef01-23456789abcd"),
        ("reset", f"{UUID}\n"),
        ("-i", UUID),
    ],
)
def test_the_example_script_refuses_all_else(gpu_clock, tmp_path, arguments):
    assert gpu_clock(*arguments) == (2, [])
    assert {path.name for path in tmp_path.iterdir()} == {"nvidia-smi"}
