"""Writes tables in Markdown, for pages that programs write."""

from collections.abc import Sequence


def markdown_table(*rows: Sequence) -> str:
    """A table; the first row is its head."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))
