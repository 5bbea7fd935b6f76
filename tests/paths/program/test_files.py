"""Files appear complete or not at all, and disk errors become one line."""

import errno

import pytest

from accelerated.program.errors import InputError
from accelerated.program.files import written_whole


def test_a_file_appears_whole(tmp_path):
    """The old file stays during writing; then only the new file is there. A `new` file replaces none."""
    path = tmp_path / "file"
    path.write_text("old")
    with written_whole(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old" and beside.parent == tmp_path
    words = "file exists by now, and nothing is overwritten"
    with pytest.raises(InputError, match=words), written_whole(path, new=True) as beside:
        beside.write_text("newer")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


ERRORS = {  # {what is raised half-way: what is said; None: the error itself}
    OSError(
        errno.ENOSPC, "No space left on device"
    ): "No space left on device; free some space, or give another",
    OSError(errno.EACCES, "Permission denied"): "Permission denied; give another",
    RuntimeError("unexpected pos"): "unexpected pos; free some space, or give another",
    KeyboardInterrupt(): None,
}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_what_fails_half_way_leaves_the_old_file(tmp_path, error):
    path, said = tmp_path / "file", ERRORS[error]
    path.write_text("old")
    with (
        pytest.raises(InputError if said else type(error)) as caught,
        written_whole(path, "give another") as beside,
    ):
        beside.write_text("half")
        raise error
    assert str(caught.value) == f"cannot write {path}: {said}" if said else caught.value is error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
