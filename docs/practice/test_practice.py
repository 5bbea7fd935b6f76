"""Each task of the files beside this one, as a test: `python -m pytest FOLDER` in the clone."""

from pathlib import Path

import pytest

from docs.practice.judging import BEGIN, FILES, HERE, judge_file
from docs.practice.tasks import tasks_of

FOLDER = Path(__file__).parent
TASKS = [(file, task.name) for file in FILES for task in tasks_of(file)]


@pytest.mark.parametrize("file,task", TASKS)
def test_answer(file, task):
    """Right on examples of all sizes; a task that is not begun is skipped."""
    folder = BEGIN if FOLDER == HERE else FOLDER
    (verdict,) = judge_file(folder, file, task)
    if verdict.status == "not begun":
        pytest.skip("not begun")
    if verdict.status == "wrong":
        pytest.fail("\n".join(verdict.lines), pytrace=False)
