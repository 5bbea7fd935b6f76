"""Practice on a page: a task beside its section, judged in the reader's browser by the same judge.

The answer runs in the worker that judges it; page/runtime.js ends that worker if no example is
done for some seconds. docs/practice is what it is on the command line.
"""

import tempfile
from pathlib import Path

import numpy as np

from docs.book import live
from docs.excerpts import definitions_in
from docs.practice.__main__ import files_and_tasks
from docs.practice.answering import Refused, answer_of, load, results_of
from docs.practice.judging import judge
from docs.practice.tasks import BEGIN, tasks_of

HEAD = "import numpy as np\n\n\n"  # so that a line has the number that the editor shows


def tasks(names: list[str]) -> list[dict]:
    """The tasks that names of files or tasks mean, each with the text that the reader completes."""
    found = []
    for file, only in files_and_tasks(names):
        path = BEGIN / f"{file}.py"
        lines = path.read_text(encoding="utf-8").splitlines()
        for task in tasks_of(file):
            if only in ("", task.name):
                where = definitions_in(path)[task.name]
                text = "\n".join(lines[where.start : where.stop])
                found.append({"file": file, "task": task.name, "text": f"{HEAD}{text}\n"})
    return found


def judged(file: str, task: str, texts: dict[str, str]) -> dict:
    """What the judge says of a task's answer; texts are {task: text} of all answers in its file."""
    (chosen,) = (each for each in tasks_of(file) if each.name == task)
    others = [text for name, text in texts.items() if name != task]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{file}.py"
        path.write_text("\n\n\n".join([texts[task], *others]), encoding="utf-8")
        try:
            names = load(path)
        except Refused as refused:
            return {"status": "wrong", "lines": [str(refused)]}

        def ask(sizes: dict, seed: int) -> dict:
            live.alive()
            given = chosen.given(np.random.default_rng(seed), sizes)
            return results_of(chosen, answer_of(names, task), given)

        _, status, lines = judge(chosen, ask)
    return {"status": status, "lines": lines}
