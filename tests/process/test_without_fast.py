"""accelerated/fast/ can be deleted: in a copy of the project without it everything works."""

import shlex

import pytest

from tests.helpers.copies import copy_of_the_project, run
from tests.helpers.programs import MEMFORMER, TINY
from tests.helpers.variants import ONE_OF_EACH

pytestmark = pytest.mark.timeout(400)
RUNS = {"block_recurrent": TINY, "memformer": MEMFORMER}
CONTRACT = (
    "test_accelerated_equals_reference",
    "test_dropout_acts_where_the_reference_has_it",
    "test_step_and_advance_equal_forward",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project without the room of faster paths."""
    folder = copy_of_the_project(tmp_path_factory.mktemp("project"), without="fast")
    (folder / "text.txt").write_text("a text that every model can read " * 100)
    return folder


def test_no_file_of_it_is_left(project):
    code = "from accelerated.attention import heads; print(heads.__file__, heads.HAS_FAST_PATHS)"
    file, has_fast_paths = run(project, "-c", shlex.quote(code)).split()
    assert file.startswith(str(project)), "another copy of the project is imported"
    assert has_fast_paths == "False"


def test_the_contract_passes(project):
    """For one variant of each model: equal to the reference, dropout, and steps of generation."""
    tests = [
        f"tests/test_contract.py::{test}[{' '.join(case)}]"
        for test in CONTRACT
        for case in ONE_OF_EACH
    ]
    printed = run(project, "-m pytest -q -p no:cacheprovider", shlex.join(tests))
    assert f"{len(tests)} passed" in printed


@pytest.mark.parametrize("model", RUNS)
def test_a_model_is_trained_resumed_and_generates(project, model):
    """By train.py and eval.py."""
    options = f"--data text.txt --out {model} --steps 2"
    assert "bits per byte" in run(project, "train.py", *RUNS[model], options)
    assert "bits per byte" in run(project, f"train.py --resume {model} --steps 3")
    assert "a text" in run(project, f"eval.py sample {model} --prompt 'a text' --tokens 9")
