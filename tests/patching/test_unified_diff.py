import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patch_project import maker

from envpipe_megatron.patching.unified_diff import PatchError, parse_patch, split_lines

make = maker()
# Few different lines, so that the same stretch stands in many places.
LINES = st.lists(st.sampled_from([b"a", b"b", b"", b"c\r", b"\xff\xfe"]), max_size=14)


@st.composite
def contents(draw):
    text = b"\n".join(draw(LINES))
    return text + b"\n" if draw(st.booleans()) else text


@settings(max_examples=300, deadline=None)
@given(contents(), contents())
def test_a_diff_applies_reverts_and_fits_at_one_place_only(before, after):
    if before == after or not after:
        return
    text = make.diff(make.Change("dir/file.txt", before or None, after))
    (patch,) = parse_patch(text)
    assert patch.is_new == (not before)
    assert patch.apply(before) == after
    assert patch.revert(after) == before
    for hunk in patch.hunks:
        for content, lines in ((before, hunk.old_lines), (after, hunk.new_lines)):
            whole = split_lines(content)
            starts = range(len(whole) - len(lines) + 1)
            places = [at for at in starts if tuple(whole[at : at + len(lines)]) == lines]
            assert len(places) == 1 or not lines or tuple(split_lines(before)) == hunk.old_lines


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(contents(), contents())
def test_git_apply_makes_the_same_bytes(tmp_path, before, after):
    if before == after or not after:
        return
    file = tmp_path / "dir" / "file.txt"
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if before:
        file.write_bytes(before)
    text = make.diff(make.Change("dir/file.txt", before or None, after))
    for flag, wanted in ((), after), (("-R",), before):
        subprocess.run(["git", "apply", *flag], input=text, cwd=tmp_path, check=True)
        assert (file.read_bytes() if file.exists() else b"") == wanted


@pytest.mark.parametrize("number", [1, 3])
def test_context_grows_only_where_a_hunk_would_fit_twice(number):
    alike = [b"x\n", b"y\n", b"z\n"] * number
    before = [b"head\n", *alike, b"tail\n"]
    after = [*before[:2], b"new\n", *before[2:]]
    change = make.Change("f", b"".join(before), b"".join(after))
    (patch,) = parse_patch(make.diff(change))
    (hunk,) = patch.hunks
    # `x`, `y` around the new line are there `number` times; with `head` in front, once.
    assert len(hunk.old_lines) == (2 if number == 1 else 4)


def test_a_hunk_fits_at_its_lines_or_not_at_all():
    text = make.diff(make.Change("f", b"a\nb\nc\n", b"a\nB\nc\n"))
    (patch,) = parse_patch(text)
    for other in (b"new\na\nb\nc\n", b"a\nb\n", b"", b"a\nb\r\nc\n", b"a\nb\nc"):
        with pytest.raises(PatchError, match="differs from what the patch expects"):
            patch.apply(other)


HEAD = b"--- a/f\n+++ b/f\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "empty"),
        (HEAD, "no hunk"),
        (HEAD + b"@@ -1 +1 @@\n-a\n", "ends too early"),
        (HEAD + b"@@ -1 +1 @@\n-a\n?b\n", "damaged"),
        (HEAD + b"@@ -1,2 +1 @@\n-a\n+b\n+c\n-d\n", "lengths"),
        (HEAD + b"@@ x @@\n", "header"),
        (HEAD + b"@@ -1 +1 @@\n-a\n+b\nrubbish\n", "may only change text"),
        (b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "names no changed file"),
        (b"rename from f\nrename to g\n", "may only change text"),
        (b"old mode 100644\nnew mode 100755\n", "may only change text"),
        (b"new file mode 100755\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+a\n", "may only"),
        (HEAD.replace(b"/f", b"/../f") + b"@@ -1 +1 @@\n-a\n+b\n", "leads out"),
        (HEAD.replace(b"/f", b"//etc/f") + b"@@ -1 +1 @@\n-a\n+b\n", "leads out"),
        (HEAD.replace(b"/f", b"/.git/f") + b"@@ -1 +1 @@\n-a\n+b\n", "leads out"),
        (2 * (HEAD + b"@@ -1 +1 @@\n-a\n+b\n"), "twice"),
    ],
)
def test_what_a_patch_may_not_hold_is_refused(text, said):
    with pytest.raises(PatchError, match=said):
        parse_patch(text)
