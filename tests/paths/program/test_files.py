"""Files appear complete or not at all, and disk errors become one line."""

import errno

import pytest

from accelerated.program.errors import InputError
from accelerated.program.files import written_whole

FULL, DENIED = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EACCES, "Permission denied")
ERRORS = [  # (what is raised half-way, what is said; None: the error itself)
    (FULL, "cannot write {}: No space left on device; free some space, or give another --out"),
    (DENIED, "cannot write {}: Permission denied; give another --out"),
    (RuntimeError("unexpected pos"), "cannot write {}: unexpected pos; free some space, or give another --out"),
    (InputError("said before"), "said before"),
    (KeyboardInterrupt(), None),
    (ValueError("a mistake"), None),
]


def test_a_file_appears_whole(tmp_path):
    """The old file stays during writing; then only the new file is there. A `new` file replaces none."""
    path = tmp_path / "file"
    path.write_text("old")
    with (
        pytest.raises(InputError, match="file exists by now, and nothing is overwritten"),
        written_whole(path, new=True) as beside,
    ):
        beside.write_text("new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with written_whole(path) as beside:
        beside.write_text("new")
        assert path.read_text() == "old" and beside.parent == tmp_path
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error,said", ERRORS, ids=[repr(error) for error, _ in ERRORS])
def test_what_fails_half_way_leaves_the_old_file(tmp_path, error, said):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(InputError if said else type(error)) as caught, written_whole(path, "give another --out") as beside:
        beside.write_text("half")
        raise error
    assert str(caught.value) == said.format(path) if said else caught.value is error
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
