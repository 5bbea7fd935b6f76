"""`eval.py view`: losses are those of scoring; the page works in a browser."""

import argparse
import html
import json
import math
import re
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document
from accelerated.evaluation import view
from accelerated.evaluation.score import evaluate, token_nats
from accelerated.program.errors import InputError
from tests.conftest import ROOT
from tests.helpers.reading import read_alone, trained_run
from tests.helpers.texts import BYTES, MERGED, SINGLE_BYTES, document_from
from tests.helpers.variants import pairs
from tests.house.browser import BROWSER

TEXT = "the theatre and the abbey\n\nthat he heard of a b a b, the theatre\n"
PARTLY = [True] * 20 + [False] * 30  # which tokens are scored
TEMPLATE = (ROOT / "accelerated" / "evaluation" / "view.html").read_text()
BIT = math.log(2)  # nats


# The page's data


def page_of(run, path, **options):
    """(the record, the lines, the page's data) of a page written to path."""
    asked = {"first": 1, "segments": None} | options
    record, lines = view.report(run, argparse.Namespace(out=str(path), **asked))
    found = r'<script type="application/json" id="page">(.*?)</script>'
    [data] = re.findall(found, path.read_text(), re.S)
    assert "<" not in data, "a text could end the script"
    return record, lines, json.loads(data)


def text_of(data):
    """The text that a page shows."""
    texts = [data["before"]]
    for segment in data["segments"]:
        texts += segment["texts"]
    return "".join(texts)


def losses_of(data, which):
    """The losses that a page shows, in bits: 0 with memory carried, 1 with it cleared."""
    losses = []
    for segment in data["segments"]:
        losses += segment["losses"][which]
    return losses


# Whatever the model, the page reads it in the same way
READ = pairs(compressive="conv-bptt", memformer="decoder-only", gated_deltanet="three-layers")
CASES = [(*pair, BYTES, None) for pair in READ]
CASES += [
    ("pretrained_recurrence", "overlapping", MERGED, PARTLY),
    ("block_recurrent", "lstm-dual-feedback", MERGED, PARTLY),
]


@pytest.fixture(
    params=CASES, ids=lambda case: f"{case[0]} {case[1]} {case[2].name}", scope="module"
)
def case(request, tmp_path_factory):
    """A run, the longest of its documents, its page: the record, the lines, the data."""
    torch.set_default_dtype(torch.float64)
    paper, name, tokenizer, scored = request.param
    texts = ("", "short", TEXT, TEXT[:50])
    documents = [document_from(text, tokenizer, scored) for text in texts]
    run = trained_run(paper, name, documents, tokenizer)
    record, lines, data = page_of(run, tmp_path_factory.mktemp("view") / "page.html")
    return SimpleNamespace(
        run=run, document=documents[2], record=record, lines="".join(lines), data=data
    )


def test_every_token_has_the_losses_of_scoring(case):
    """With memory carried and cleared, in bits of four decimals; sums are of rounded numbers."""
    run = case.run
    document = case.document
    data = case.data
    bars = data["overview"]["bars"]
    segments = data["segments"]
    for which, key in enumerate(("memory_carried", "cleared")):
        [nats] = token_nats(run.model, [document], 2, clear_memory=bool(which))
        total = evaluate(run.model, [document], run.tokenizer, 2, clear_memory=bool(which))
        losses = np.array(losses_of(data, which), float)
        np.testing.assert_allclose(losses, nats / BIT, atol=5.1e-5, err_msg=f"losses, {key}")
        bits = total.nats / BIT
        exact = [data["bits"][which], case.record[key]["nats"] / BIT]
        assert exact == pytest.approx([bits] * 2, rel=1e-9), f"of the page and the record, {key}"
        assert f"{total.bits_per_byte:.4f}" in case.lines
        of_segments = sum(segment["bits"][which] for segment in segments)
        assert of_segments == pytest.approx(bits, abs=5e-3), f"the sum of segments, {key}"
        for bar, segment in zip(bars, segments, strict=True):
            apart = abs(bar[which] - segment["bits"][which])
            assert apart < 1e-3, f"a bar is of other tokens than its segment, {key}: see overview"
    assert data["scored"] == case.record["tokens"] == total.tokens, "tokens that are scored"
    of_bars = sum(bar[2] for bar in bars)
    of_segments = sum(segment["bytes"] for segment in segments)
    assert data["bytes"] == of_bars == of_segments == total.text_bytes, "bytes that are scored"


def test_a_page_shows_all_tokens_of_the_longest_document(case):
    data = case.data
    assert (case.record["document"], data["documents"]) == (3, 4), "the longest of four"
    assert case.record["segments"] == [1, data["count"]], "all segments are shown"
    tokens = []
    for segment in data["segments"]:
        tokens += segment["tokens"]
    assert tokens == case.document.targets.tolist(), "the document's tokens"
    assert text_of(data) == TEXT, "the document's text"


@torch.no_grad()
def test_the_likeliest_tokens_are_those_of_the_logits(case):
    """With memory carried and cleared."""
    text = case.document.inputs[None]
    ways = [
        read_alone(case.run.model, text, lambda _, clear=clear: clear) for clear in (False, True)
    ]
    for segment, *readings in zip(case.data["segments"], *ways, strict=True):
        for (ids, shown), (window, logits, _) in zip(segment["likely"], readings, strict=True):
            assert segment["at"] == window.first, "the first token that a segment shows"
            rows = logits[0, window.first - 1 - window.start :]
            probabilities, expected = rows.softmax(-1).topk(5)
            assert ids == expected.tolist(), "the five likeliest tokens"
            rounded = (probabilities * 10_000).round().long().tolist()
            assert shown == rounded, "their probabilities, in 1/10,000"


def test_an_answer_that_is_never_read_stands_where_it_is_asked_for(tmp_path):
    """As in recall, whose targets are zero elsewhere."""
    inputs = BYTES.encode("B4,?B..?B;")
    answers = BYTES.encode("\0\0\0\x004\0\0\x004\0")
    document = Document("recall", inputs, answers, answers > 0)
    _, _, data = page_of(
        trained_run("memformer", "decoder-only", [document]), tmp_path / "page.html"
    )
    assert text_of(data) == "B4,?B4.?B4\0"
    assert data["scored"] == data["bytes"] == 2, "two answers of a byte are scored"
    assert [place for place, loss in enumerate(losses_of(data, 0)) if loss] == [4, 8]


def test_joined_documents_add_up_to_the_split(tmp_path):
    """With memory carried over documents, what the only lane reads is the page's document."""
    texts = (TEXT[:30], "abbey", TEXT[7:30], "x", TEXT[40:])
    documents = [document_from(text, BYTES) for text in texts]
    carried = {"carry_over": True, "lane_count": 1}
    run = trained_run("pretrained_recurrence", "overlapping", documents, **carried)
    record, _, data = page_of(run, tmp_path / "page.html")
    nats = evaluate(run.model, run.documents, BYTES, 1).nats
    assert record["memory_carried"]["nats"] == pytest.approx(nats, rel=1e-9), "of the joined text"
    assert record["tokens"] == run.count_predictions(), "tokens of the split"
    assert data["joined"]
    assert data["documents"] == 1
    meeting = "nothing is scored where documents meet; the one of a single token is left out"
    assert losses_of(data, 0).count(None) == 3, meeting


def test_a_page_holds_the_segments_that_are_asked_for(tmp_path, monkeypatch):
    """The losses of the whole document stay. Windows overlap, and each shows four new tokens."""
    run = trained_run("pretrained_recurrence", "overlapping", [document_from(TEXT, BYTES)])
    _, _, whole = page_of(run, tmp_path / "whole.html")
    record, lines, some = page_of(run, tmp_path / "some.html", first=4, segments=3)
    assert record["segments"] == [4, 6], "segments 4 to 6 of eight"
    assert "segments 4 to 6 are in" in lines[-1]
    before = TEXT[some["segments"][0]["at"] - 1]
    expected = {"segments": whole["segments"][3:6], "first": 4, "before": before}
    expected |= {name: whole[name] for name in ("count", "overview", "bits")}
    assert {name: some[name] for name in expected} == expected, "of segments 4 to 6"
    monkeypatch.setattr(view, "TOKENS", 30)
    record, _, _ = page_of(run, tmp_path / "few.html", first=2)
    assert record["segments"] == [2, 8], "as many as have 30 tokens"


def test_the_strongest_shade_is_that_of_the_largest_gains_or_losses():
    """A memory that only harms is shaded as one that only helps."""
    assert view.shading_scale(np.full(9, 3 * BIT)) == 3.0, "3 bits, not nats: shading_scale"
    assert view.shading_scale(np.full(9, -3 * BIT)) == 3.0, "a loss is shaded as a gain is"
    assert view.shading_scale(np.array([math.nan, 0.01])) == 0.1, "at least 0.1; NaN does not count"


def test_a_character_of_several_tokens_stands_at_its_last():
    pieces = [b"a", b"\xc3", b"\xa9", b" \xe6\x97", b"\xa5b"]
    assert view.spelled(pieces) == ["a", "", "é", " ", "日b"]
    pieces = [b"\xff", b"\xc3", b"x", b"\xe6"]
    assert view.spelled(pieces) == ["\\xff", "", "\\xc3x", "\\xe6"]
    assert view.spelled([]) == []


def test_what_cannot_be_shown_is_refused(tmp_path):
    documents = [document_from(text, BYTES) for text in (TEXT[:20], "x", TEXT[:22])]
    run = trained_run("memformer", "decoder-only", documents)
    words = "--from 5: the document has 4 segments; give a smaller number"
    with pytest.raises(InputError, match=words):
        page_of(run, tmp_path / "page.html", first=5)
    run = trained_run("compressive", "nothing-remembered", [document_from(TEXT, BYTES)])
    words = "view: this model carries no memory that could be cleared; give"
    with pytest.raises(InputError, match=words):
        page_of(run, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


# The page in a browser


def test_the_page_loads_nothing():
    addresses = re.findall(r"https?://[^\s\"'`]+", TEMPLATE)
    assert set(addresses) == {"http://www.w3.org/2000/svg"}
    loads = r"(?i)<link|\bsrc\s*=|url\(|@import|fetch\(|import\(|XMLHttpRequest|innerHTML"
    assert not re.search(loads, TEMPLATE)
    assert "default-src 'none'" in TEMPLATE


HTML = ("</script><script>hacked=1</script>", "<b id=b>")


class Spelled(Tokenizer):
    """A tokenizer that only spells ids."""

    def encode(self, text):
        raise NotImplementedError


HOSTILE = Spelled("bytes and HTML", SINGLE_BYTES + [text.encode() for text in HTML])
IDS = [*b"it's ", 256, 257]
IDS += b"\n\xff \xc3\xa9\x00\r\xe2\x80\xa8 <!-- --> `${1}` & " + b"ab " * 25
SHOWN = ["t", "'", "s", " ", *HTML, "↵\n", "\\xff", " ", "", "é", "\\x00", "␍", "", "", "\u2028"]
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --dump-dom"
FLAGS += " --virtual-time-budget=2000"
# Does what a reader does, and writes down what then stands on the page
SCRIPT = r"""
const seen = {};
const all = selector => [...document.querySelectorAll(selector)];
const one = selector => document.querySelector(selector);
const tokens = () => all("#text [data-token]");
const texts = () => tokens().map(token => token.textContent);
const place = () => all("#text h2").map(heading => parseInt(heading.innerText.split(" ")[1]));
const press = (target, key) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const change = (selector, value, name) => {
  one(selector).value = value;
  one(selector).dispatchEvent(new Event(name));
};
seen.texts = texts();
press(document.body, "ArrowRight");
seen.texts.push(...texts());
tokens()[7].focus();
press(document.activeElement, "ArrowRight");
seen.over = [place(), document.activeElement.dataset.token];
change("#slider", 1, "input");
change("#at-a-time", 4, "change");
seen.four = place();
seen.hacked = [typeof hacked, all("#b").length, document.scripts.length];
location.hash = "#segment=3&at-a-time=2&token=4&of=4";
addEventListener("hashchange", () => {
  seen.recalled = [place(), one(".chosen").dataset.token];
  const pre = document.createElement("pre");
  document.body.append(Object.assign(pre, { id: "seen", textContent: JSON.stringify(seen) }));
});
"""


def looked_at_in_a_browser(folder):
    """What stands on a page after SCRIPT has used it."""
    path = folder / "page.html"
    ids = np.array(IDS)
    scored = np.arange(len(ids) - 1) % 31 < 30
    document = Document("some", ids[:-1], ids[1:], scored)
    run = trained_run("compressive", "conv-bptt", [document], HOSTILE, data=HTML[0])
    page_of(run, path)
    path.write_text(path.read_text().replace("</body>", f"<script>{SCRIPT}</script></body>"))
    address = f"{path.as_uri()}#segment=1&at-a-time=1"
    command = [BROWSER, *FLAGS.split(), f"--user-data-dir={folder}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    match = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert match, f"the page's script ended early: {done.stderr[-2000:]}"
    return json.loads(html.unescape(match[1]))


@pytest.mark.interfaces  # not of the proof: a browser takes seconds
@pytest.mark.skipif(BROWSER is None, reason="looking at the page needs a Chromium on the path")
def test_a_pages_text_is_shown_as_text_and_keys_slider_and_address_do_what_they_say(tmp_path):
    looked_at = looked_at_in_a_browser(tmp_path)
    assert looked_at["hacked"] == ["undefined", 0, 3]
    assert looked_at["texts"] == SHOWN
    assert looked_at["over"] == [[3], "2,0"]
    assert looked_at["four"] == [2, 3, 4, 5]
    assert looked_at["recalled"] == [[3, 4], "3,3"]
