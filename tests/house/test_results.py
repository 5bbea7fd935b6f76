"""The results: few pages, each of which can be made again, and claims that are decided."""

from tests.conftest import ROOT

DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "results").glob("*.md"))
OLDER = ("log", "recall-distance")  # whose commands are those of older commits


def test_a_page_says_how_to_make_it_again():
    """How long its command takes, and the command."""
    for page in PAGES:
        text = page.read_text()
        if page.stem in OLDER:
            assert "commit" in text, page
        else:
            assert "**To make it again.** The first command takes" in " ".join(text.split()), page
            assert "```bash\npython -m accelerated.lab." in text, page


def test_every_claim_is_decided_and_every_sentence_of_the_papers_is_there():
    """A hundred sentences: a row if it is decided, else a line of a fold."""
    lines = (DOCS / "claims.md").read_text().splitlines()
    assert sum(line.startswith(('| "', '- "')) for line in lines) == 100
    rows = [line for line in lines if line.startswith('| "')]
    assert len(rows) <= 60
    verdicts = ("holds: ", "does not hold: ", "in part: ", "by construction")
    for row in rows:
        here = row.split(" | ")[-1]
        assert here.startswith(verdicts), row
