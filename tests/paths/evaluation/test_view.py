"""`eval.py view`: losses are those of scoring, shares of attention those of the reference, and the
page works in a browser.
"""

import argparse
import dataclasses
import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document, cut
from accelerated.evaluation import view
from accelerated.evaluation.score import TrainedRun, evaluate, token_nats
from accelerated.evaluation.shares import read_watched
from accelerated.program.errors import InputError
from accelerated.protocol import overlap_of
from tests.helpers.comparison import assert_agree
from tests.helpers.rollouts import both_sides
from tests.helpers.texts import BYTES, MERGED, document_from
from tests.helpers.variants import EVERY_VARIANT, ONE_OF_EACH, PAPERS, over, variant

ROOT = Path(__file__).parents[3]
CARRYING = [pair for pair in EVERY_VARIANT if pair[1] not in ("plain", "nothing-remembered")]
# they change no attention
ALIKE = "pooling|dilat|rate|none$|auto_enc|attention_recon|max|key|linear|norm|^advance"
SHARING = [
    pair
    for pair in CARRYING
    if pair[0] in ("compressive", "pretrained_recurrence") or pair[1].startswith("decoder-only")
]
SHARING = [pair for pair in SHARING if not re.search(ALIKE, pair[1])]
TEXT = "the theatre and the abbey\n\nthat he heard of a b a b, the theatre\n"
PARTLY = [True] * 20 + [False] * 30  # which tokens are scored
TEMPLATE = (ROOT / "accelerated" / "evaluation" / "view.html").read_text()


# Where attention went


def parts_of(paper, c):
    """({part: its keys}, in the order of a softmax; in how many layers there is one)."""
    if paper == "compressive":
        return {
            "compressed memory": c.compressed_memory,
            "memory": c.memory,
            "this segment": c.segment,
        }, c.layers
    if paper == "memformer":
        return {"memory slots": c.slots, "this segment": c.segment}, c.decoder_layers
    return {f"inserted vector{'s' * (c.vectors > 1)}": c.vectors, "this window": c.segment}, len(
        c.insertion_layers
    )


@over(SHARING)
def test_shares_are_those_of_the_references_attention(paper, name, monkeypatch):
    """Averaged over layers and heads; a part without keys is left out."""
    monkeypatch.setattr("accelerated.attention.on_a_cpu.TILE", 3)
    config, rng, params, state, model, torch_state = both_sides(paper, name)
    tokens = rng.integers(config.vocabulary, size=(2, config.segment))
    reference, softmaxes = PAPERS[paper].reference, []
    softmax = reference.softmax_forward
    monkeypatch.setattr(
        reference,
        "softmax_forward",
        lambda scores: softmaxes.append(softmax(scores)[0]) or softmax(scores),
    )
    reference.forward(params, config, tokens, state)
    parts, layers = parts_of(paper, config)
    parts = {part: size for part, size in parts.items() if size}
    weights = [
        w for w in softmaxes if w.shape[2:] == (config.segment, sum(parts.values()))
    ]  # (B, H, N, K)
    assert len(weights) == layers, "a softmax of the reference was not found"
    pieces = np.split(np.mean(weights, (0, 2)), np.cumsum([*parts.values()])[:-1], axis=-1)
    expected = np.stack([piece.sum(-1) for piece in pieces], -1)  # (B, N, P)
    model, given = model.eval(), (torch.tensor(tokens), torch_state)
    reading, group = read_watched(model, paper, *given)
    assert torch.equal(reading.hidden, model.read(*given).hidden)
    assert not any(module._forward_hooks for module in model.modules())
    assert_agree({"shares": expected}, {"shares": group.values}, 1e-9)
    assert (
        group.values.shape == expected.shape
        and group.parts == tuple(parts)
        and not group.values.requires_grad
    )
    assert (group.values > -1e-12).all() and torch.allclose(
        group.values.sum(-1), torch.ones(2, config.segment)
    )


# The page's data


def run_of(paper, name, documents, tokenizer=BYTES, carry_over=False):
    """A TrainedRun of a model with random weights."""
    config = dataclasses.replace(variant(paper, name), vocabulary=len(tokenizer.token_bytes))
    model = PAPERS[paper].random_model(config)
    about = (
        SimpleNamespace(model=paper),
        {"step": 7},
        tokenizer,
        2,
        "some data",
        {"valid": documents},
        carry_over,
    )
    return TrainedRun("runs/some", model, *about)


def page_of(run, path, **options):
    """(the record, the lines, the page's data) of a page written to path."""
    asked = {"first": 1, "segments": None} | options
    record, lines = view.report(run, argparse.Namespace(out=str(path), **asked))
    [data] = re.findall(
        r'<script type="application/json" id="page">(.*?)</script>', path.read_text(), re.S
    )
    assert "<" not in data, "a text could end the script"
    return record, lines, json.loads(data)


CASES = [(*pair, BYTES, None) for pair in ONE_OF_EACH]
CASES += [
    ("pretrained_recurrence", "overlapping", MERGED, PARTLY),
    ("block_recurrent", "lstm-dual-feedback", MERGED, PARTLY),
]


@pytest.mark.parametrize("paper,name,tokenizer,scored", CASES)
def test_every_token_has_the_losses_of_scoring_and_the_likeliest_of_the_logits(
    paper, name, tokenizer, scored, tmp_path
):
    documents = [document_from(text, tokenizer, scored) for text in ("", "short", TEXT, TEXT[:50])]
    run, document = run_of(paper, name, documents, tokenizer), documents[2]
    record, lines, data = page_of(run, tmp_path / "page.html")
    nats = [token_nats(run.model, [document], 2, clear)[0] for clear in (False, True)]
    scores = [evaluate(run.model, [document], tokenizer, 2, clear) for clear in (False, True)]
    assert (record["document"], data["documents"], record["segments"]) == (3, 4, [1, data["count"]])
    for which, key in (
        (0, "memory_carried"),
        (1, "cleared"),
    ):  # the page's number of a reading, the record's name of it
        losses = [loss for segment in data["segments"] for loss in segment["losses"][which]]
        np.testing.assert_allclose(
            np.array(losses, float), nats[which] / math.log(2), atol=5.1e-5
        )  # bits of 4 decimals
        assert data["bits"][which] == pytest.approx(scores[which].nats / math.log(2), rel=1e-9)
        assert record[key]["nats"] == pytest.approx(scores[which].nats, rel=1e-9)
        assert f"{scores[which].bits_per_byte:.4f}" in "".join(lines)
        for rows in (
            data["overview"]["bars"],
            [[*segment["bits"], segment["bytes"]] for segment in data["segments"]],
        ):
            assert sum(row[which] for row in rows) == pytest.approx(
                data["bits"][which], abs=5e-3
            )  # sums of rounded numbers
            assert (
                sum(row[2] for row in rows) == data["bytes"] == scores[which].text_bytes
            )  # a row: bits, bits, bytes
    assert data["scored"] == record["tokens"] == scores[0].tokens
    assert [
        token for segment in data["segments"] for token in segment["tokens"]
    ] == document.targets.tolist()
    assert (
        data["before"] + "".join(text for segment in data["segments"] for text in segment["texts"])
        == TEXT
    )
    model, config, state = (
        run.model,
        run.model.config,
        run.model.initial_state(1),
    )  # the likeliest tokens, by the logits
    windows = cut(len(document.inputs) + 1, config.segment, overlap_of(config))
    for segment, window in zip(data["segments"], windows, strict=True):
        tokens = torch.zeros(1, config.segment, dtype=torch.long)
        tokens[0, : window.stop - window.start] = torch.tensor(
            document.inputs[window.start : window.stop].astype(int)
        )
        cleared = model(tokens, model.initial_state(1)).logits
        carried, state, _ = model(tokens, state)
        assert segment["at"] == window.first
        for (ids, shares), logits in zip(segment["likely"], (carried, cleared), strict=True):
            scored_here = slice(window.first - 1 - window.start, window.stop - window.start)
            probabilities, tokens_of = logits[0, scored_here].softmax(-1).topk(5)
            assert (
                ids == tokens_of.tolist()
                and shares == (probabilities * 10_000).round().long().tolist()
            )
        assert all(
            abs(sum(row) - 1000) <= len(data["looked"]["parts"])
            for row in segment.get("shares", [])
        ), "rounded to 1/1000"


def test_shares_are_those_of_the_carried_memory_and_no_softmax_of_its_own_has_any(tmp_path):
    """In the first segment nothing is inserted; later windows look at the inserted vector.

    An unknown model has no shares.
    """
    run = run_of("pretrained_recurrence", "overlapping", [document_from(f"<{TEXT}", BYTES)])
    _, _, data = page_of(run, tmp_path / "page.html")
    first, *later = ([row[0] for row in segment["shares"]] for segment in data["segments"])
    assert not any(first) and all(map(all, later))
    for paper, name, known_as in (
        ("memformer", "encoder-decoder", "memformer"),
        ("block_recurrent", "fixed-skip", "toy"),
    ):
        run = run_of(paper, name, [document_from(TEXT, BYTES)])._replace(
            settings=SimpleNamespace(model=known_as)
        )
        _, _, data = page_of(run, tmp_path / f"{known_as}.html")
        assert data["looked"] is None and not any(
            "shares" in segment for segment in data["segments"]
        )


def test_an_answer_that_is_never_read_stands_where_it_is_asked_for(tmp_path):
    """As in recall, whose targets are zero elsewhere."""
    inputs, answers = BYTES.encode("B4,?B..?B;"), BYTES.encode("\0\0\0\x004\0\0\x004\0")
    document = Document("recall", inputs, answers, answers > 0)
    _, _, data = page_of(run_of("memformer", "decoder-only", [document]), tmp_path / "page.html")
    assert (
        data["before"] + "".join(text for segment in data["segments"] for text in segment["texts"])
        == "B4,?B4.?B4\0"
    )
    assert data["scored"] == data["bytes"] == 2
    assert [
        k
        for k, loss in enumerate(loss for part in data["segments"] for loss in part["losses"][0])
        if loss
    ] == [4, 8]


def test_joined_documents_add_up_to_the_split(tmp_path):
    """With the memory carried over documents, the part that the only lane reads is the page's
    document.
    """
    documents = [
        document_from(text, BYTES) for text in (TEXT[:30], "abbey", TEXT[7:30], "x", TEXT[40:])
    ]
    run = run_of("pretrained_recurrence", "overlapping", documents, carry_over=True)._replace(
        lane_count=1
    )
    record, _, data = page_of(run, tmp_path / "page.html")
    assert record["memory_carried"]["nats"] == pytest.approx(
        evaluate(run.model, run.documents, BYTES, 1).nats, rel=1e-9
    )
    assert record["tokens"] == run.count_predictions() and data["joined"] and data["documents"] == 1
    losses = [loss for segment in data["segments"] for loss in segment["losses"][0]]
    assert losses.count(None) == 3, "where documents meet; the one of a single token is left out"


def test_a_page_holds_the_segments_that_are_asked_for(tmp_path, monkeypatch):
    """The losses of the whole document stay."""
    run = run_of("compressive", "conv-bptt", [document_from(TEXT, BYTES)])  # 8 segments of 8 tokens
    whole = page_of(run, tmp_path / "whole.html")[2]
    some = page_of(run, tmp_path / "some.html", first=4, segments=3)
    assert some[0]["segments"] == [4, 6] and "segments 4 to 6 are in" in some[1][-1]
    assert (
        some[2]["segments"] == whole["segments"][3:6]
        and some[2]["first"] == 4
        and some[2]["before"] == TEXT[24]
    )
    assert (
        some[2]["overview"] == whole["overview"]
        and some[2]["bits"] == whole["bits"]
        and some[2]["count"] == 8
    )
    monkeypatch.setattr(view, "TOKENS", 30)
    assert page_of(run, tmp_path / "few.html", first=2)[0]["segments"] == [2, 4]
    monkeypatch.setattr(view, "BARS", 3)
    strip = page_of(run, tmp_path / "bars.html")[2]["overview"]
    assert strip["segments"] == 3 and [row[2] for row in strip["bars"]] == [
        24,
        24,
        len(TEXT) - 1 - 48,
    ]


def test_a_character_of_several_tokens_stands_at_its_last():
    assert view.spelled([b"a", b"\xc3", b"\xa9", b" \xe6\x97", b"\xa5b"]) == [
        "a",
        "",
        "é",
        " ",
        "日b",
    ]
    assert (
        view.spelled([b"\xff", b"\xc3", b"x", b"\xe6"]) == ["\\xff", "", "\\xc3x", "\\xe6"]
        and view.spelled([]) == []
    )


def test_what_cannot_be_shown_is_refused(tmp_path):
    run = run_of(
        "memformer",
        "decoder-only",
        [document_from(text, BYTES) for text in (TEXT[:20], "x", TEXT[:22])],
    )
    with pytest.raises(
        InputError, match="--from 5: the document has 4 segments; give a smaller number"
    ):
        page_of(run, tmp_path / "page.html", first=5)
    with pytest.raises(
        InputError, match="view: this model carries no memory that could be cleared; give"
    ):
        page_of(
            run_of("compressive", "nothing-remembered", [document_from(TEXT, BYTES)]),
            tmp_path / "page.html",
        )
    assert not list(tmp_path.iterdir())


# The page in a browser


def test_the_page_loads_nothing_and_is_installed_with_the_package():
    assert set(re.findall(r"https?://[^\s\"'`]+", TEMPLATE)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"(?i)<link|\bsrc\s*=|url\(|@import|fetch\(|import\(|XMLHttpRequest|innerHTML", TEMPLATE
    )
    assert (
        "default-src 'none'" in TEMPLATE and 'view.html"]' in (ROOT / "pyproject.toml").read_text()
    )


HTML = ("</script><script>hacked=1</script>", "<b id=b>")


class Spelled(Tokenizer):
    """A tokenizer that only spells ids."""

    def encode(self, text):
        raise NotImplementedError


HOSTILE = Spelled(
    "bytes and HTML", [*(bytes([byte]) for byte in range(256)), *map(str.encode, HTML)], ""
)
IDS = np.array(
    [*b"it's ", 256, 257, *b"\n\xff \xc3\xa9\x00\r\xe2\x80\xa8 <!-- --> `${1}` & ", *b"ab " * 25]
)
KNOWN = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, KNOWN)), None)
FLAGS = [
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-dev-shm-usage",
    "virtual-time-budget=2000",
    "dump-dom",
]
# Does what a reader does, and writes down what then stands on the page
SCRIPT = r"""
const seen = {};
const all = selector => [...document.querySelectorAll(selector)];
const one = selector => document.querySelector(selector);
const tokens = () => all("#text [data-token]");
const texts = () => tokens().map(token => token.textContent);
const place = () => all("#text h2").map(heading => parseInt(heading.innerText.split(" ")[1]));
const cells = row => [...row.cells].map(cell => cell.innerText);
const rows = table => [...table.rows].filter(row => row.cells.length == 2).map(cells);
const key = (target, name) => {
  const options = { key: name, bubbles: true, cancelable: true };
  target.dispatchEvent(new KeyboardEvent("keydown", options));
};
const change = (selector, value, name) => {
  one(selector).value = value;
  one(selector).dispatchEvent(new Event(name));
};
seen.texts = texts();
key(document.body, "ArrowRight");
seen.texts.push(...texts());
seen.shades = tokens().map(token => token.className);
tokens()[3].dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
seen.tables = all("#detail table").map(rows);
tokens()[7].focus();
key(document.activeElement, "ArrowRight");
seen.over = [place(), document.activeElement.dataset.token];
change("#slider", 1, "input");
change("#at-a-time", 4, "change");
seen.four = place();
seen.hacked = [typeof hacked, all("#b").length, document.scripts.length];
location.hash = "#segment=3&at-a-time=2&token=4&of=4";
addEventListener("hashchange", () => {
  seen.recalled = [place(), one(".chosen").dataset.token];
  const shown = { id: "seen", textContent: JSON.stringify(seen) };
  document.body.append(Object.assign(document.createElement("pre"), shown));
});
"""


@pytest.mark.skipif(BROWSER is None, reason="looking at the page needs a Chromium on the path")
def test_the_page_works_in_a_browser(tmp_path):
    """Its text is shown as text; pointing says the numbers of a token; keys, slider and address do
    what they say.
    """
    path, document = (
        tmp_path / "page.html",
        Document("some", IDS[:-1], IDS[1:], np.arange(len(IDS) - 1) % 31 < 30),
    )
    _, _, data = page_of(
        run_of("compressive", "conv-bptt", [document], HOSTILE)._replace(data=HTML[0]), path
    )
    path.write_text(path.read_text().replace("</body>", f"<script>{SCRIPT}</script></body>"))
    command = [
        BROWSER,
        *(f"--{flag}" for flag in FLAGS),
        f"--user-data-dir={tmp_path}",
        f"{path.as_uri()}#segment=1&at-a-time=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    match = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert match, f"the page's script ended early: {done.stderr[-2000:]}"
    seen, second = json.loads(html.unescape(match[1])), data["segments"][1]
    assert seen["hacked"] == ["undefined", 0, 3]
    assert seen["texts"] == [
        *"t's ",
        *HTML,
        "↵\n",
        "\\xff",
        " ",
        "",
        "é",
        "\\x00",
        "␍",
        "",
        "",
        "\u2028",
    ]
    # The second segment: its shades, and the panel of its token 3
    gains = [cleared - carried for carried, cleared in zip(*second["losses"], strict=True)]
    shades = [
        "part " * (not text) + ("helps" if gain > 0 else "hurts")
        for text, gain in zip(second["texts"], gains, strict=True)
    ]
    assert seen["shades"] == shades and all(gains)
    losses, *likeliest, attention = (
        [(name, float(value.split()[0])) for name, value in table] for table in seen["tables"]
    )
    carried, cleared = (of_tokens[3] for of_tokens in second["losses"])
    expected = {"loss, memory carried": carried, "loss, memory cleared": cleared}
    expected["saved by the memory" if gains[3] > 0 else "lost by the memory"] = abs(gains[3])
    assert dict(losses) == pytest.approx(expected, abs=0.0051)
    for table, (ids, shares) in zip(likeliest, second["likely"], strict=True):
        for (name, percent), token, share in zip(
            table, ids[3], shares[3], strict=False
        ):  # the right token may follow
            text = data["vocabulary"][str(token)]
            assert percent == pytest.approx(share / 100, abs=0.051)
            assert name == text or not text.isprintable() or " " in text, (
                "others are shown by signs"
            )
    parts = zip(data["looked"]["parts"], second["shares"][3], strict=True)
    assert dict(attention) == pytest.approx({part: share / 10 for part, share in parts})
    # Keys, slider and address
    assert (
        seen["over"] == [[3], "2,0"]
        and seen["four"] == [2, 3, 4, 5]
        and seen["recalled"] == [[3, 4], "3,3"]
    )
