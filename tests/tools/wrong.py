"""Mistakes that a port may make, planted in a copy of a reference or of a port: for house/test_check.py and house/test_ports.py.

A block of wrong_conventions.txt or wrong_in_c.txt is the rule that is broken, the paper, the case of docs/vectors that has to
notice, the tensor that the checker has to name, and the text before (-) and after (+).
"""

from pathlib import Path
from typing import NamedTuple


class Wrong(NamedTuple):
    """A piece of a file's text, and what replaces it."""

    rule: str
    paper: str
    case: str
    first: str  # the tensor that is named
    old: str
    new: str

    def planted(self, source):
        """The source with the mistake."""
        assert self.old in source, f"{self.old!r} is not in the file; {self.rule}"
        return source.replace(self.old, self.new)


def read_wrong(name):
    """[Wrong] of a file beside this one."""
    found = []
    for block in (Path(__file__).parent / name).read_text().strip().split("\n\n"):
        head, *lines = block.splitlines()
        rule, _, words = head.partition(": ")
        found.append(Wrong(rule, *words.split(), *("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")))
    return found
