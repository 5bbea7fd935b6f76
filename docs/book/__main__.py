"""The open book: python -m docs.book --out FOLDER writes docs/ as a site, chapters beside their
code and a real run of it.

record.py runs a reference and keeps what its variables held, replay.py does so for memory replay,
text.py makes HTML of a page and formula.py of its formulas, method.py collects what a chapter shows
beside its text, and site.py writes all pages. Pages load nothing from elsewhere. It needs NumPy,
markdown-it-py, latex2mathml and Pygments, and no torch: `pip install numpy markdown-it-py
latex2mathml Pygments`.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

# {module: what pip calls it}
NEEDED = {
    "numpy": "numpy",
    "markdown_it": "markdown-it-py",
    "latex2mathml": "latex2mathml",
    "pygments": "Pygments",
}


def main(argv: list[str] | None = None) -> int:
    """Build the book; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m docs.book", description="Write the book, a folder of pages for a browser."
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder; index.html is its first page"
    )
    out = parser.parse_args(argv).out
    missing = " ".join(pip for module, pip in NEEDED.items() if find_spec(module) is None)
    if missing:
        print(
            f"the book needs {missing}, which is not here: pip install {missing}", file=sys.stderr
        )
        return 2

    from docs.book.site import build  # after the check of what it imports

    try:
        sizes = build(out)
    except OSError as error:
        print(f"cannot write --out {out}: {error.strerror}; give another folder", file=sys.stderr)
        return 2
    for page, size in sorted(sizes.items()):
        print(f"{size / 1e6:6.2f} MB  {out / page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
