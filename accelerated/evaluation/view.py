"""eval.py view: a page that shows what memory changed for each token of a document.

view.html is the page without its data; it loads nothing from elsewhere.
"""

import argparse
import codecs
import json
import math
from pathlib import Path

import numpy as np
import torch

from accelerated.attention.heads import at_least_float32
from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document, Window, cut, lengths_of
from accelerated.evaluation.positions import score_of_span
from accelerated.evaluation.score import (
    Answer,
    Score,
    TrainedRun,
    carried_through,
    check_numbers,
    is_stateless,
    token_nats,
)
from accelerated.program.errors import InputError, counted
from accelerated.program.files import written_whole
from accelerated.protocol import Model, logits_of, overlap_of

TOKENS = 1 << 14  # on a page, unless --segments asks for more: about 2 MB
LIKELIEST = 5  # tokens that are listed at a prediction
BARS = 400  # at most, in the strip along the document
PLACE = "DATA_OF_THE_PAGE"  # where view.html takes its data
TEMPLATE = Path(__file__).with_name("view.html")
BIT = math.log(2)  # nats


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """Write the page of the longest document; the record has its path and the document's sums."""
    model = run.model
    if is_stateless(model):
        raise InputError(
            "view: this model carries no memory that could be cleared; give another run"
        )
    documents = run.documents
    number = int(lengths_of(documents).argmax())
    document = documents[number]
    length = len(document.inputs) + 1
    windows = cut(length, model.config.segment, overlap_of(model.config))
    shown = windows_to_show(run, len(windows), options)

    nats = []
    for clear in (False, True):
        nats += token_nats(model, [document], run.lane_count, clear_memory=clear)
    scores = []
    for values in nats:
        score, _ = score_of_span(slice(None), [values], [document], run.tokenizer)
        check_numbers(score.nats)
        scores.append(score)
    data = about(run, number, scores) | document_data(run, document, windows, nats, shown)
    size = write_page(Path(options.out), data)

    segments = [shown.start + 1, shown.stop]
    record = {"page": options.out, "bytes": size, "document": number + 1, "segments": segments}
    place = f"document {number + 1:,} of {len(documents):,}"
    lines = [f"{place}, {counted(len(windows), 'segment')}"]
    for name, score in zip(("memory carried", "cleared"), scores, strict=True):
        sums = {"nats": score.nats, "bits_per_byte": score.bits_per_byte}
        record[name.replace(" ", "_")] = sums
        lines.append(f"bits per byte       {score.bits_per_byte:.4f}, {name}")
    record |= {"tokens": scores[0].tokens, "text_bytes": scores[0].text_bytes}
    which = f"segments {segments[0]:,} to {segments[1]:,}"
    lines.append(f"{which} are in {options.out}, {size / 1e6:.1f} MB")
    return record, lines


def windows_to_show(run: TrainedRun, count: int, options: argparse.Namespace) -> range:
    """The numbers of the windows that the page shows, of so many; raises InputError if none are."""
    if options.first > count:
        raise InputError(
            f"--from {options.first}: the document has {counted(count, 'segment')}; "
            "give a smaller number"
        )
    new_tokens = run.model.config.segment - overlap_of(run.model.config)
    asked = options.segments or max(1, TOKENS // new_tokens)
    return range(options.first - 1, count)[:asked]


def about(run: TrainedRun, number: int, scores: list[Score]) -> dict:
    """What the page says of the run and of document `number`, with its two Scores."""
    return {
        "model": run.settings.model,
        "describe": run.model.describe(),
        "run": run.path,
        "step": run.checkpoint["step"],
        "data": run.data,
        "split": run.split,
        "joined": run.carry_over,
        "document": number + 1,
        "documents": len(run.documents),
        "scored": scores[0].tokens,
        "bytes": scores[0].text_bytes,
        "bits": [score.nats / BIT for score in scores],
    }


def document_data(
    run: TrainedRun, document: Document, windows: list[Window], nats: list[np.ndarray], shown: range
) -> dict:
    """The page's data: the losses along the document, and of its windows in `shown` each token.

    nats are the token_nats with memory carried and cleared. The text is what was read; an answer of
    --data recall is never read, and is shown after its question.
    """
    tokenizer = run.tokenizer
    text_bytes = tokenizer.token_bytes[document.targets] * document.scored
    read_next = np.append(document.inputs[1:], document.targets[-1:])
    targets = np.where(document.scored, document.targets, read_next)
    start = windows[shown.start].first - 1
    stop = windows[shown.stop - 1].stop
    tokens = np.concatenate([document.inputs[start : start + 1], targets[start:stop]])
    texts = spelled([tokenizer.decode([token]) for token in tokens])

    records = segment_records(run, document, windows[: shown.stop], shown.start)
    for window, record in zip(windows[shown.start : shown.stop], records, strict=True):
        predicted = slice(window.first - 1, window.stop)
        here = [values[predicted] for values in nats]
        record |= {
            "at": window.first,
            "tokens": targets[predicted].tolist(),
            "bytes": int(text_bytes[predicted].sum()),
            "texts": texts[window.first - start : window.stop + 1 - start],
            "losses": [losses_in_bits(values) for values in here],
            "bits": [round(float(np.nansum(values)) / BIT, 4) for values in here],
        }
    return {
        "count": len(windows),
        "first": shown.start + 1,
        "before": texts[0],
        "scale": shading_scale((nats[1] - nats[0])[start:stop]),
        "overview": overview(windows, nats, text_bytes),
        "segments": records,
        "vocabulary": vocabulary_of(records, tokenizer),
    }


@torch.no_grad()
def segment_records(
    run: TrainedRun, document: Document, windows: list[Window], first: int
) -> list[dict]:
    """What a model expects in each of the document's windows from number `first` on."""
    model = run.model
    device = model.embedding.device
    records = []
    reading = carried_through(model, [document], 1, predict=False)
    for window, (segment, [number], state, _) in zip(windows, reading, strict=False):
        if number < first:
            continue
        tokens = segment.tokens.to(device)
        rows = slice(window.first - 1 - window.start, window.stop - window.start)
        likely = []
        for before in (state, model.initial_state(1)):
            hidden = model.read(tokens, before).hidden
            likely.append(likeliest(model, hidden[0, rows]))
        records.append({"likely": likely})
    return records


def likeliest(model: Model, hidden: torch.Tensor) -> tuple[list, list]:
    """(The ids of the LIKELIEST tokens after each of the rows (n, D); their probabilities).

    Probabilities are in hundredths of a percent.
    """
    probabilities = at_least_float32(logits_of(model, hidden)).softmax(-1)
    largest, ids = probabilities.topk(min(LIKELIEST, model.config.vocabulary))
    return ids.tolist(), (largest * 10_000).round().long().tolist()


def losses_in_bits(nats: np.ndarray) -> list[float | None]:
    """Each loss in bits of four decimals; None if it is not scored."""
    bits = (nats / BIT).tolist()
    return [None if math.isnan(loss) else round(loss, 4) for loss in bits]


def spelled(pieces: list[bytes]) -> list[str]:
    r"""The text that each token shows: a character of several tokens stands at its last one.

    \xNN is a byte that is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    last = len(pieces) - 1
    return [decoder.decode(piece, place == last) for place, piece in enumerate(pieces)]


def vocabulary_of(records: list[dict], tokenizer: Tokenizer) -> dict[int, str]:
    """{id: its text} of all tokens that records name."""
    used = set()
    for record in records:
        used.update(record["tokens"])
        for ids, _ in record["likely"]:
            for row in ids:
                used.update(row)
    shown = {}
    for token in sorted(used):
        shown[token] = tokenizer.decode([token]).decode(errors="backslashreplace")
    return shown


def overview(windows: list[Window], nats: list[np.ndarray], text_bytes: np.ndarray) -> dict:
    """The strip along the document, a bar for every `segments` segments.

    A bar has the bits with memory carried and cleared, and the bytes.
    """
    segments = math.ceil(len(windows) / BARS)
    starts = [window.first - 1 for window in windows[::segments]]
    columns = [np.add.reduceat(np.nan_to_num(values) / BIT, starts) for values in nats]
    bars = np.stack([*columns, np.add.reduceat(text_bytes, starts)], 1)
    return {"segments": segments, "bars": bars.round(4).tolist()}


def shading_scale(gains: np.ndarray) -> float:
    """The gain in bits that has the strongest shade: 99 of 100 tokens have less. At least 0.1."""
    sizes = np.abs(gains[~np.isnan(gains)]) / BIT
    largest = float(np.quantile(sizes, 0.99)) if len(sizes) else 0.0
    return float(f"{max(0.1, largest):.1g}")


def write_page(path: Path, data: dict) -> int:
    """Write the page and return its size in bytes.

    In its JSON no < stands, so that no text can end the script.
    """
    script = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    template = TEMPLATE.read_text(encoding="utf-8")
    page = template.replace(PLACE, script.replace("<", "\\u003c")).encode()
    with written_whole(path, "give another --out", new=True) as temporary:
        temporary.write_bytes(page)
    return len(page)
