"""Which loss trains what, as the papers have it: the table that test_reach.py measures and that
docs/trust.md shows.

It stands in reach.txt. Below a paper are its groups of parameters, each with a pattern of their
names; a name is in the last group whose pattern is found in it, or else in that without one. Then
rows: a cell for each group, what a page calls the row, and a pattern of subjects. A later row
changes the cells of earlier ones.

A loss is read in one pass over a segment; the subject "LOSS WHEN VARIANT" names it. LOSS is `own`
(the segment's own tokens), `infilling` or `recall` (Memformer's other tasks), `compression` (the
compression's own loss), or one of these after `next-`: the next segment's loss, which arrives
through the state alone. WHEN is `first` or `later`: the segment's place in its document.
"""

import re
from pathlib import Path

ALL = "●"
PART = "◐"
ZERO = "0"
SAME = "·"  # of a group's parameters; SAME leaves what an earlier row says
CELLS = ALL + PART + ZERO + SAME
GROUPS = {}  # {paper: {group of parameters: pattern of their names}}
ROWS = {}  # {paper: [(label, pattern of subjects, cells)]}

for part in Path(__file__).with_suffix(".txt").read_text("utf-8").split("== ")[1:]:
    paper, *lines = part.strip().splitlines()
    GROUPS[paper] = {}
    ROWS[paper] = []
    for line in lines:
        if line[0] in CELLS:
            cells, _, row = line.partition(" ")
            label, _, pattern = row.partition(" = ")
            ROWS[paper].append((label, pattern, cells))
        else:
            group, _, pattern = line.partition(":")
            GROUPS[paper][group] = pattern.strip()


def group_of(paper, name):
    """The group of a parameter: the last whose pattern it has, else that without a pattern."""
    found = None
    for group, pattern in GROUPS[paper].items():
        if not pattern:
            found = found or group
        elif re.search(pattern, name):
            found = group
    return found


def expected_cells(paper, subject):
    """{group: ALL, PART or ZERO} of a subject."""
    cells = {}
    for _, pattern, row in ROWS[paper]:
        if not re.search(pattern, subject):
            continue
        for group, cell in zip(GROUPS[paper], row, strict=True):
            if cell != SAME:
                cells[group] = cell
    return cells


def reach_table(paper):
    """The table of docs/trust.md: what each loss of a paper trains."""
    groups = GROUPS[paper]
    lines = [f"| loss | {' | '.join(groups)} |", "| --- |" + " :-: |" * len(groups)]
    for label, _, cells in ROWS[paper]:
        shown = [cell.replace(SAME, "") for cell in cells]
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return "\n".join(lines)
