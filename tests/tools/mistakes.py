"""Fills in docs/ports/mistakes.json: which cases of docs/vectors catch each known mistake, and how.

    python -m tests.tools.mistakes

A mistake is a text in a function of a reference and what stands in its place, with a flag, a
sentence and the source where it was made. Its cases are {case: the first wrong tensor}. flags.json
has the same by case and tensor: python -m tests.tools.vectors writes it beside the vectors, for the
checker.
"""

import json
from pathlib import Path

from docs.practice.tasks import changed
from reference import check
from tests.helpers.variants import PAPERS
from tests.tools.cases import EVERY_CASE
from tests.tools.vectors import FOLDER, computed

CATALOGUE = Path(__file__).parents[2] / "docs" / "ports" / "mistakes.json"
FLAGS = Path(__file__).with_name("flags.json")


def caught(mistake: dict) -> dict:
    """{case: the first wrong tensor} of the cases that catch it; not those that it cannot run."""
    paper = mistake["paper"]
    texts = (mistake[name] for name in ("function", "old", "new"))
    wrong = changed(PAPERS[paper].reference, *texts)
    begins = {}
    for name in [name for of, name in EVERY_CASE if of == paper]:
        expected, _ = check.load(FOLDER / paper / f"{name}.safetensors")
        try:
            found = computed(paper, name, wrong, steps=False)
        except ValueError:  # shapes that do not fit
            continue
        first = check.first_wrong(check.compare(expected, expected | found))
        if first:
            begins[name] = first.name
    return begins


def main() -> None:
    """Write the catalogue anew, a line for each mistake, and {paper/case: {tensor: flags}}."""
    mistakes = [each | {"cases": caught(each)} for each in json.loads(CATALOGUE.read_text())]
    flags: dict = {}
    for each in mistakes:
        for case, first in each["cases"].items():
            of_case = flags.setdefault(f"{each['paper']}/{case}", {})
            of_case.setdefault(first, []).append(each["flag"])
    FLAGS.write_text(json.dumps(flags, indent=1) + "\n")
    lines = [json.dumps(each, ensure_ascii=False) for each in mistakes]
    CATALOGUE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
