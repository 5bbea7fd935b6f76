"""The open book: python -m docs.book shows docs/ as a site, chapters beside their code and a real
run of it, in a browser on this machine. With --out FOLDER it writes the pages instead.

record.py runs a reference and keeps what its variables held, replay.py does so for memory replay,
text.py makes HTML of a page and formula.py of its formulas, method.py collects what a chapter shows
beside its text and values.py keeps it, site.py makes pages and serve.py shows them. runtime.py gets
Python for the reader's browser, where live.py answers what pages ask. Pages load nothing from
elsewhere. It needs NumPy, markdown-it-py, latex2mathml and Pygments, and no torch:
`pip install numpy markdown-it-py latex2mathml Pygments`.
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
        "python -m docs.book", description="Show the book in a browser, from this machine."
    )
    out = "write all pages into this folder instead; index.html is the first"
    parser.add_argument("--out", metavar="FOLDER", help=out)
    port = "where the browser finds it (default: 8765, or a free one if that is taken)"
    parser.add_argument("--port", type=int, default=8765, metavar="N", help=port)
    parser.add_argument("--no-browser", action="store_true", help="print the address alone")
    python = "do not fetch Python for the reader's browser (17 MB, once)"
    parser.add_argument("--no-python", action="store_true", help=python)
    options = parser.parse_args(argv)
    if options.out == "":
        parser.error("--out is empty; give the name of a folder")
    missing = " ".join(pip for module, pip in NEEDED.items() if find_spec(module) is None)
    if missing:
        print(
            f"the book needs {missing}, which is not here: pip install {missing}", file=sys.stderr
        )
        return 2

    if options.out is None:
        from docs.book.serve import serve  # after the check of what it imports

        serve(options.port, opens=not options.no_browser, fetches=not options.no_python)
        return 0
    return write(Path(options.out), fetches=not options.no_python)


def write(out: Path, fetches: bool) -> int:
    """Write all pages, if `fetches` with the parts of Python; returns the exit code."""
    from docs.book.runtime import fetch
    from docs.book.site import build

    if fetches:
        fetch()
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
