"""Fills in docs/ports/mistakes.json: which cases of docs/vectors catch each known mistake, and how.

    python -m tests.tools.mistakes

A mistake is a text in a function of a reference and what stands in its place, with a flag, a
sentence, the source where it was made, and a part of what the checker says of it. Its cases are
{case: [the first wrong tensor, how wrong all are (check.mark_of)]}. After it
python -m tests.tools.vectors writes the flags beside the vectors, for the checker.
"""

import json

from docs.practice.tasks import changed
from reference import check
from tests.helpers.variants import PAPERS
from tests.tools.cases import EVERY_CASE
from tests.tools.vectors import CATALOGUE, FOLDER, computed


def rows_with(mistake: dict) -> dict[str, list[check.Row]]:
    """{case: all its rows} of the cases that catch a mistake; it can run them."""
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
        rows = check.compare(expected, expected | found)
        if not all(row.passes for row in rows):
            begins[name] = rows
    return begins


def shown(begins: dict[str, list[check.Row]]) -> dict[str, list]:
    """{case: [the first wrong tensor, how wrong all are]}, as the catalogue has it."""
    return {name: [*check.mark_of(rows)] for name, rows in begins.items()}


def main() -> None:
    """Write the catalogue anew, a line for each mistake."""
    mistakes = json.loads(CATALOGUE.read_text())
    mistakes = [each | {"cases": shown(rows_with(each))} for each in mistakes]
    lines = [json.dumps(each, ensure_ascii=False) for each in mistakes]
    CATALOGUE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
