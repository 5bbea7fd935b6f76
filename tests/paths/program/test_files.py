"""Files appear complete or not at all, and disk errors become one line."""

import errno

import pytest

from accelerated.program.errors import InputError
from accelerated.program.files import disk_errors, written_whole


def test_a_file_appears_whole(tmp_path):
    """The old file stays during writing; then only the new file is there."""
    path = tmp_path / "file"
    path.write_text("old")
    with written_whole(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old" and beside.parent == tmp_path
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EACCES, "Permission denied"),
        RuntimeError("unexpected pos"),
        KeyboardInterrupt(),
        ValueError("a mistake"),
    ],
)
def test_what_fails_half_way_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")
    refused = isinstance(error, (OSError, RuntimeError))
    with pytest.raises(InputError if refused else type(error)) as caught, written_whole(path, "give another --out") as beside:
        beside.write_text("half")
        raise error
    if refused:
        reason = getattr(error, "strerror", None) or error
        space = "" if getattr(error, "errno", None) == errno.EACCES else "free some space, or "
        assert str(caught.value) == f"cannot write {path}: {reason}; {space}give another --out"
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_an_input_error_inside_is_unchanged(tmp_path):
    with pytest.raises(InputError, match=r"^said before$"), written_whole(tmp_path / "file"):
        raise InputError("said before")


def test_a_missing_folder(tmp_path):
    advice = "give another --data-dir"
    with (
        pytest.raises(InputError, match=f"cannot write .*: No such.*; {advice}"),
        written_whole(tmp_path / "no" / "file") as beside,
    ):
        beside.write_text("x")
    with pytest.raises(InputError, match=f"cannot write .*target: No such.*; {advice}"), disk_errors(tmp_path / "target"):
        (tmp_path / "target" / "file").write_text("x")
