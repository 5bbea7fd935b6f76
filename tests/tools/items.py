"""Writes docs/items.md anew: of every item of the four papers, how to run it, and its test.

    python -m tests.tools.items

The items stand in items.txt, below their chapter, two lines each: what it is and its place in the
paper, then = and the option or command; and the test below tests/ that shows it, -k WORD for those
of its cases that are called so. An item that is not here has no command, and for its test a dash
and a sentence that says why. The named tests run, and if one does not exist, is skipped or fails,
nothing is written. What the page says beside its tables stays.
"""

import sys
import textwrap
from pathlib import Path

from tests.tools.trust import ROOT, Claim, by_chapter, folded_tests, in_turn, listed, shown

ITEMS = Path(__file__).with_name("items.txt")
PAGE = ROOT / "docs" / "items.md"


def read_items() -> list[Claim]:
    """The items of items.txt.

    `how` is the command; without one the item is not here, and `test` is the sentence.
    """
    found = []
    for chapter, number, says, place, line in listed(ITEMS.read_text()):
        place, _, how = place.partition(") = ")
        test, _, word = line.partition(" -k ")
        test = f"tests/{test}" if how else test.removeprefix("- ")
        found.append(Claim(chapter, str(number), says, place.removesuffix(")"), test, word, how))
    return found


def chapter_part(items: list[Claim]) -> str:
    """A chapter's table, the folded list of its tests, and what is not here."""
    here = [item for item in items if item.how]
    lines = ["| | item | place | option or command |", "| --- | --- | --- | --- |"]
    for item in here:
        lines.append(f"| {item.name} | {item.says} | {item.place} | {item.how} |")
    lines += [*folded_tests(here), "", "Not here:", ""]
    for item in items:
        if not item.how:
            line = f"- **{item.says}** ({item.place}). {item.test}"
            lines += textwrap.wrap(line, 120, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def with_items(page: str, items: list[Claim]) -> str:
    """The page with the tables and lists of these items."""
    return in_turn(page, r"\| \| item ", r"\n\n## |\n\Z", by_chapter(items, chapter_part))


def main() -> int:
    """Run the tests of all items and write the page; returns 1 if one cannot be shown."""
    items = read_items()
    if shown([item for item in items if item.how]) is None:
        return 1
    PAGE.write_text(with_items(PAGE.read_text(), items))
    return 0


if __name__ == "__main__":
    sys.exit(main())
