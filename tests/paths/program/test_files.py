"""Files appear complete or not at all, and disk errors become one line."""

import errno
import os
from unittest.mock import Mock

import pytest

from accelerated.program.errors import InputError
from accelerated.program.files import written_whole


def test_a_file_appears_whole(tmp_path):
    """The old file stays during writing; then only the new file is there."""
    path = tmp_path / "file"
    path.write_text("old")
    with written_whole(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old"
        assert beside.parent == tmp_path
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_replaces_none(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    words = "file exists by now, and nothing is overwritten"
    with pytest.raises(InputError, match=words), written_whole(path, new=True) as beside:
        beside.write_text("new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


FULL = OSError(errno.ENOSPC, "No space left on device")
DENIED = OSError(errno.EACCES, "Permission denied")
QUOTA = OSError(errno.EDQUOT, "Disk quota exceeded")
OF_TORCH = RuntimeError("unexpected pos")  # if the disk is full
SAID = [
    (FULL, "the disk is full; free some space, or give another"),
    (QUOTA, "the disk is full; free some space, or give another"),
    (DENIED, "Permission denied; give another"),
    (OF_TORCH, "the disk is full; free some space, or give another"),
]


@pytest.mark.parametrize("error, said", SAID)
def test_a_disk_error_or_an_interrupt_half_way_leaves_the_old_file(tmp_path, error, said):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(InputError) as caught, written_whole(path, "give another") as beside:
        beside.write_text("half")
        raise error
    assert str(caught.value) == f"cannot write {path}: {said}"
    with pytest.raises(KeyboardInterrupt), written_whole(path) as beside:
        beside.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Otherwise it may be empty under its name after a power failure."""
    calls = Mock()
    for name in ("fsync", "replace"):
        calls.attach_mock(Mock(wraps=getattr(os, name)), name)
        monkeypatch.setattr(os, name, getattr(calls, name))
    with written_whole(tmp_path / "file") as beside:
        beside.write_text("new")
    assert [name for name, *_ in calls.mock_calls] == ["fsync", "replace"]
