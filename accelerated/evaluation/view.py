"""eval.py view: a page that shows for each token of a document what the carried memory changed and where attention went.

view.html is the page without its data; it loads nothing from elsewhere.
"""

import argparse
import codecs
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch.nn import Module

from accelerated.attention.heads import at_least_float32
from accelerated.data.windows import Document, Window, cut, lengths_of
from accelerated.evaluation.score import (
    Score,
    TrainedRun,
    carried_through,
    carries_nothing,
    check_score,
    token_nats,
)
from accelerated.evaluation.shares import Shares, read_watched
from accelerated.program.errors import InputError, counted
from accelerated.program.files import written_whole
from accelerated.protocol import logits_of, overlap_of

TOKENS = 1 << 14  # on a page, unless --segments asks for more: about 2 MB
LIKELIEST = 5  # tokens that are listed at a prediction
BARS = 400  # at most, in the strip along the document
PLACE = "DATA_OF_THE_PAGE"  # where view.html takes its data


def spelled(pieces: list[bytes]) -> list[str]:
    r"""The text that each token shows: a character of several tokens stands at its last one; \xNN is a byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    return [
        decoder.decode(piece, final)
        for final, piece in ((at + 1 == len(pieces), piece) for at, piece in enumerate(pieces))
    ]


def likeliest(model: Module, hidden: torch.Tensor) -> tuple[list, list]:
    """The ids of the LIKELIEST tokens after each of the rows (n, D), and their probabilities in hundredths of a percent."""
    probabilities, ids = (
        at_least_float32(logits_of(model, hidden))
        .softmax(-1)
        .topk(min(LIKELIEST, model.config.vocabulary))
    )
    return ids.tolist(), (probabilities * 10_000).round().long().tolist()


@torch.no_grad()
def segment_records(
    run: TrainedRun, document: Document, windows: list[Window], first: int
) -> tuple[list[dict], Shares | None]:
    """What the page says, besides losses, of each of the document's windows from number `first` on; and the last one's Shares."""
    model, device, records = run.model, next(run.model.parameters()).device, []
    for window, (segment, [number], state, _) in zip(
        windows, carried_through(model, [document], 1, predict=False), strict=False
    ):
        if number < first:
            continue
        tokens, rows = (
            segment.tokens.to(device),
            slice(window.first - 1 - window.start, window.stop - window.start),
        )
        carried, shares = read_watched(model, run.settings.model, tokens, state)
        both = carried, model.read(tokens, model.initial_state(1))
        records.append({"likely": [likeliest(model, reading.hidden[0, rows]) for reading in both]})
        if shares:
            records[-1]["shares"] = (shares.values[0, rows] * 1000).round().long().tolist()
    return records, shares


def overview(windows: list[Window], nats: list[np.ndarray], text_bytes: np.ndarray) -> dict:
    """The strip along the document: of every `segments` segments the bits with memory carried and cleared, and the bytes."""
    segments = -(-len(windows) // BARS)
    starts = [window.first - 1 for window in windows[::segments]]
    carried, cleared = (
        np.add.reduceat(np.nan_to_num(values) / math.log(2), starts) for values in nats
    )
    bars = np.stack([carried, cleared, np.add.reduceat(text_bytes, starts)], 1)
    return {"segments": segments, "bars": bars.round(4).tolist()}


def shading_scale(gains: np.ndarray) -> float:
    """The gain in bits that has the strongest shade: 99 of 100 tokens have a smaller one. At least 0.1."""
    gains = np.abs(gains[~np.isnan(gains)]) / math.log(2)
    return float(f"{max(0.1, np.quantile(gains, 0.99) if len(gains) else 0):.1g}")


def document_data(
    run: TrainedRun, document: Document, windows: list[Window], nats: list[np.ndarray], shown: range
) -> dict:
    """The page's data: the losses along the document, and of its windows in `shown` all that is said token by token.

    The text is what was read; an answer of --data recall is never read, and is shown after its question.
    """
    tokenizer, targets, scored = (
        run.tokenizer,
        np.asarray(document.targets),
        np.asarray(document.scored),
    )
    text_bytes = tokenizer.token_bytes[targets] * scored
    targets = np.where(scored, targets, np.append(np.asarray(document.inputs)[1:], targets[-1:]))
    records, shares = segment_records(run, document, windows[: shown.stop], shown.start)
    start, stop = windows[shown.start].first - 1, windows[shown.stop - 1].stop
    before = np.asarray(document.inputs[start : start + 1])
    texts = spelled(
        [tokenizer.decode([token]) for token in np.concatenate([before, targets[start:stop]])]
    )
    for window, record in zip(windows[shown.start : shown.stop], records, strict=True):
        predicted = slice(window.first - 1, window.stop)
        record |= {
            "at": window.first,
            "tokens": targets[predicted].tolist(),
            "bytes": int(text_bytes[predicted].sum()),
        }
        record |= {"texts": texts[window.first - start : window.stop + 1 - start]}
        in_bits = ((values[predicted] / math.log(2)).tolist() for values in nats)
        record |= {
            "losses": [
                [None if math.isnan(loss) else round(loss, 4) for loss in losses]
                for losses in in_bits
            ]
        }
        record |= {
            "bits": [round(float(np.nansum(values[predicted])) / math.log(2), 4) for values in nats]
        }
    used = {
        token
        for record in records
        for ids, _ in record["likely"]
        for row in [*ids, record["tokens"]]
        for token in row
    }
    vocabulary = {
        token: tokenizer.decode([token]).decode(errors="backslashreplace") for token in sorted(used)
    }
    scale, strip = (
        shading_scale((nats[1] - nats[0])[start:stop]),
        overview(windows, nats, text_bytes),
    )
    about = {
        "count": len(windows),
        "first": shown.start + 1,
        "before": texts[0],
        "scale": scale,
        "overview": strip,
    }
    about |= {"looked": shares and {"title": shares.title, "parts": shares.parts}}
    return about | {"segments": records, "vocabulary": vocabulary}


def write_page(path: Path, data: dict) -> int:
    """Write the page and return its size in bytes. In its JSON no < stands, so that no text can end the script."""
    script = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    page = (
        Path(__file__)
        .with_name("view.html")
        .read_text(encoding="utf-8")
        .replace(PLACE, script)
        .encode()
    )
    with written_whole(path, "give another --out", new=True) as temporary:
        temporary.write_bytes(page)
    return len(page)


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """Write the page of the longest document; the record has its path and the document's sums."""
    if carries_nothing(model := run.model):
        raise InputError(
            "view: this model carries no memory that could be cleared; give another run"
        )
    documents, size, overlap = run.documents, model.config.segment, overlap_of(model.config)
    number = int(lengths_of(documents).argmax())
    document = documents[number]
    windows = cut(len(document.inputs) + 1, size, overlap)
    if options.first > len(windows):
        raise InputError(
            f"--from {options.first}: the document has {counted(len(windows), 'segment')}; give a smaller number"
        )
    shown = range(options.first - 1, len(windows))[
        : options.segments or max(1, TOKENS // (size - overlap))
    ]
    nats = [
        token_nats(model, [document], run.lane_count, clear_memory=clear)[0]
        for clear in (False, True)
    ]
    scored = np.asarray(document.scored)
    text_bytes = int(run.tokenizer.token_bytes[np.asarray(document.targets)[scored]].sum())
    scores = [
        check_score(Score(float(values[scored].sum()), int(scored.sum()), text_bytes=text_bytes))
        for values in nats
    ]
    about = {
        "model": run.settings.model,
        "describe": model.describe(),
        "run": run.path,
        "step": run.checkpoint["step"],
    }
    about |= {
        "data": run.data,
        "split": run.split,
        "joined": run.carry_over,
        "document": number + 1,
    }
    about |= {"documents": len(documents), "scored": scores[0].tokens, "bytes": text_bytes}
    about |= {"bits": [score.nats / math.log(2) for score in scores]}
    written = write_page(
        Path(options.out), about | document_data(run, document, windows, nats, shown)
    )
    lines = [f"document {number + 1:,} of {len(documents):,}, {counted(len(windows), 'segment')}"]
    record = {
        "page": options.out,
        "bytes": written,
        "document": number + 1,
        "segments": [shown.start + 1, shown.stop],
    }
    for name, score in zip(("memory carried", "cleared"), scores, strict=True):
        lines.append(f"bits per byte       {score.bits_per_byte:.4f}, {name}")
        record[name.replace(" ", "_")] = {"nats": score.nats, "bits_per_byte": score.bits_per_byte}
    record |= {"tokens": scores[0].tokens, "text_bytes": text_bytes}
    return record, [
        *lines,
        f"segments {shown.start + 1:,} to {shown.stop:,} are in {options.out}, {written / 1e6:.1f} MB",
    ]
