"""The parser of a command `python -m accelerated.lab.PROGRAM` whose help is its docstring."""

import argparse

from accelerated.program.parser import OptionParser


def parser_of(program: str, about: str | None) -> OptionParser:
    """A parser without options, whose help says `about` as it stands."""
    return OptionParser(
        prog=f"python -m accelerated.lab.{program}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
