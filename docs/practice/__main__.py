"""python -m docs.practice: where you stand. With names of files or tasks, what is wrong with them.

`--copy FOLDER` makes a folder of your own. `--hint TASK` says a task's idea, `--hint TASK 2` the
shape of the derivation, `--hint TASK 3` the formula. Judging needs Hypothesis; nothing needs torch.
Exit code 0 if all that was named is done, 1 if not, 2 for bad input.
"""

import argparse
import difflib
import shutil
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

from docs.practice.tasks import BEGIN, FILES, hints_of, tasks_of
from reference.check import CheckError, exit_code


def copy_to(folder: Path) -> None:
    """Copy the files that the reader fills in; nothing is overwritten."""
    if folder.exists():
        raise CheckError(f"--copy {folder}: it exists; give the name of a new folder")
    shutil.copytree(BEGIN, folder, ignore=shutil.ignore_patterns("__pycache__"))
    print(
        f"Begin with {folder}/{FILES[0]}.py, then:\n"
        f"  python -m docs.practice --in {folder} {FILES[0]}"
    )


def files_and_tasks(names: list[str]) -> list[tuple[str, str]]:
    """[(file, task or "")] of names such as memformer, memformer.slot_scores, slot_scores."""
    known = {}
    for file in FILES:
        known[file] = (file, "")
        for task in tasks_of(file):
            known[task.name] = known[f"{file}.{task.name}"] = (file, task.name)
    chosen = []
    for name in names or FILES:
        word = Path(name).name.removesuffix(".py")
        if word not in known:
            nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.0)[0]
            raise CheckError(f"{name} is no file or task; the nearest is {nearest}")
        chosen.append(known[word])
    return chosen


def print_hint(name: str, number: str = "1", *more: str) -> None:
    """Print a task's hint of that number."""
    [(file, task)] = files_and_tasks([name])
    hints = hints_of(file, task) if task else []
    if more or not hints or number not in map(str, range(1, len(hints) + 1)):
        raise CheckError(f"--hint {name} {number}: give a task, and 1, 2 or 3")
    for line in textwrap.wrap(hints[int(number) - 1], 98):
        print(line)
    if int(number) < len(hints):
        print(f"\nmore: python -m docs.practice --hint {task} {int(number) + 1}")


def report(file: str, verdicts: list, whole: bool) -> None:
    """Print a line for each Verdict; whole: with all that is said of it."""
    done = sum(verdict.status == "done" for verdict in verdicts)
    print(f"{file}: {done} of {len(verdicts)} done")
    for verdict in verdicts:
        print(f"  {verdict.task:<26}{verdict.status}")
        for line in verdict.lines if whole else verdict.lines[:1]:
            print(f"      {line}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser("python -m docs.practice", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a file or a task (default: all)")
    parser.add_argument(
        "--hint", nargs="+", metavar=("TASK", "NUMBER"), help="one of a task's hints: 1, 2 or 3"
    )
    parser.add_argument("--copy", type=Path, metavar="FOLDER", help="make a folder of your own")
    where = "where your files are (default: those in docs/practice/begin)"
    parser.add_argument(
        "--in", type=Path, metavar="FOLDER", dest="folder", default=BEGIN, help=where
    )
    options = parser.parse_args(argv)
    return exit_code("docs.practice", lambda: copied_or_all_done(options))


def copied_or_all_done(options: argparse.Namespace) -> bool:
    """Copy the files, or judge those that are named: whether all is done."""
    if options.hint:
        print_hint(*options.hint)
        return True
    if options.copy:
        copy_to(options.copy)
        return True
    if not options.folder.is_dir():
        raise CheckError(f"--in {options.folder}: no such folder; --copy makes it")
    chosen = files_and_tasks(options.names)
    if find_spec("hypothesis") is None:
        raise CheckError("judging needs Hypothesis, which is not here: pip install hypothesis")
    from docs.practice.judging import judge_file  # after the check of what it imports

    all_done = True
    print(f"in {options.folder}")
    for file, task in chosen:
        verdicts = judge_file(options.folder / f"{file}.py", task)
        report(file, verdicts, whole=bool(options.names))
        all_done &= all(verdict.status == "done" for verdict in verdicts)
    return all_done


if __name__ == "__main__":
    sys.exit(main())
