"""eval.py score: sums of log-probabilities, and counts.

train.py and the other reports score documents by this file.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from accelerated.data.lanes import Segment, joined_for_lanes, one_pass
from accelerated.data.recall import RecallDocuments
from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document, Documents, count_windows, lengths_of
from accelerated.program.errors import InputError, counted
from accelerated.program.progress import Progress
from accelerated.protocol import Model, State, evaluating, keep_lanes, overlap_of, replace_lanes
from accelerated.replay import logits_in_chunks, targets_of
from accelerated.training.settings import Settings

# PG-19: Compressive Transformers, Table 2. WikiText-103: Merity et al. (2016), which counts every
# line's end as a word; raw has as many, because <unk> is a word
WIKITEXT_WORDS = {"train": 103_227_021, "valid": 217_646, "test": 245_569}
PG19_WORDS = {"train": 1_973_136_207, "valid": 3_007_061, "test": 6_966_499}
OFFICIAL_WORDS = {
    "pg19": PG19_WORDS,
    "wikitext-103": WIKITEXT_WORDS,
    "wikitext-103-raw": WIKITEXT_WORDS,
}
NAN = (
    "the model's predictions are NaN: its numbers overflow; "
    "give another --checkpoint, or train again"
)

# What a report returns: plain values for --json, and the lines to print
Answer: TypeAlias = tuple[dict, list[str]]


class TrainedRun(NamedTuple):
    """A run that eval.py has opened, and the documents to read."""

    path: str
    model: Model  # in evaluation mode
    settings: Settings
    checkpoint: dict
    tokenizer: Tokenizer
    lane_count: int  # lanes (rows of a batch) that read documents
    data: str = ""  # --data, or what the run was trained on
    splits: Mapping[str, Documents] = MappingProxyType({})  # one for most reports, none for sample
    carry_over: bool = False  # whether memory is carried over documents

    def to_read(self, split: str) -> Sequence[Document]:
        """What is read of a split: its documents.

        If memory is carried over documents, it is parts of their joined text.
        """
        documents = self.splits[split]
        if self.carry_over:
            return joined_for_lanes(self.lane_count, documents, least=self.model.config.segment)
        return documents

    def by_document(self, nats: list[np.ndarray]) -> list[np.ndarray]:
        """The losses of each document of the only split, from token_nats of what was read of it."""
        if not self.carry_over:
            return nats
        lengths = lengths_of(self.splits[self.split])
        # In the joined text a prediction of the next document's first token is after each
        is_joined = lengths > 0
        ends = np.cumsum(lengths + is_joined)
        parts = np.split(np.concatenate(nats), ends[:-1])
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    @property
    def split(self) -> str:
        """The name of the only split."""
        [name] = self.splits
        return name

    @property
    def documents(self) -> Sequence[Document]:
        """What is read of the only split."""
        return self.to_read(self.split)

    def count_predictions(self) -> int:
        """How many tokens of the only split can be predicted: all except each document's first."""
        return int(lengths_of(self.splits[self.split]).sum())

    def words(self, split: str | None = None) -> tuple[int, str]:
        """(Words in the text of a split, or of the only one; how they were counted).

        Published perplexities per word divide by the official count. It is used for a whole split
        if ours is within 1% of it; otherwise the text is another one, and ours counts.
        """
        split = split or self.split
        documents = self.splits[split]
        words = int(documents.words.sum())
        in_official_way = words
        if self.data.startswith("wikitext"):
            in_official_way += int(documents.line_ends.sum())
        official = OFFICIAL_WORDS.get(self.data, {}).get(split, 0)
        is_near = 100 * abs(in_official_way - official) <= official
        is_official = official > 0 and documents.whole and is_near
        if not is_official:
            return words, "counted between white space"
        if in_official_way == official:
            return official, "official count"
        return official, f"official count; here {in_official_way:,} are counted"

    def about(self, cleared: bool) -> dict:
        """What is evaluated, and how: the first fields of a report's JSON."""
        return {
            "run": self.path,
            "model": self.settings.model,
            "step": self.checkpoint["step"],
            "config": dataclasses.asdict(self.model.config),
            "data": self.data,
            "split": self.split,
            "whole_split": self.splits[self.split].whole,
            "memory_cleared": cleared,
            "carry_over_documents": self.carry_over,
        }

    def memory(self, cleared: bool) -> str:
        """What is done with the memory, in words."""
        has_memory = not is_stateless(self.model)
        if has_memory and not cleared:
            way = "over documents" if self.carry_over else "through each document"
            return f"memory carried {way}"
        memory = "memory cleared at every segment" if has_memory else "no memory"
        return f"{memory}, documents joined" if self.carry_over else memory


def ratio(total: float, count: int) -> float:
    """total / count, NaN if nothing was counted."""
    return total / count if count else math.nan


class Score(NamedTuple):
    """Sums over scored tokens, and rates computed from them, NaN if nothing was scored."""

    nats: float = 0.0  # summed -log p
    tokens: int = 0
    right: int = 0  # tokens that were predicted as the most probable
    text_bytes: int = 0  # bytes of text that the tokens spell

    @property
    def bits_per_token(self) -> float:
        return ratio(self.nats / math.log(2), self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return ratio(self.nats / math.log(2), self.text_bytes)

    @property
    def accuracy(self) -> float:
        return ratio(self.right, self.tokens)

    def perplexity(self, units: int) -> float:
        """exp(-sum of log p / units), per token or per word; infinite if no double holds it."""
        exponent = ratio(self.nats, units)
        return math.inf if exponent > 700 else math.exp(exponent)


class Predictions(NamedTuple):
    """How well a model predicted each token of a segment, on the host."""

    nats: np.ndarray  # (B, N) float64, -log p of the target; 0 if it is not scored
    right: np.ndarray  # (B, N) bool, whether the target is scored and was the most probable token


NOT_PREDICTED = Predictions(np.empty((0, 0)), np.empty((0, 0), bool))


class Carried(NamedTuple):
    """A segment that was read with the state carried through its documents."""

    segment: Segment
    number: np.ndarray  # (B,) of the segment in its document, from 0
    state: State  # before the segment, on the model's device; the rest is on the host
    predictions: Predictions


def is_stateless(model: Model) -> bool:
    """Whether the model's state is empty, so that segments are independent, as in plain GPT-2."""
    return not any(field.numel() for field in model.initial_state(1))


@torch.no_grad()
def predictions_of(model: Model, hidden: Tensor, segment: Segment) -> Predictions:
    """The Predictions of a segment from its Reading's hidden (B, N, D); logits are made in chunks.

    Losses are computed in float32 or better. They become float64 on the host: not every GPU has it.
    """
    targets = targets_of(segment).flatten()
    nats = []
    right = []
    chunks = logits_in_chunks(hidden.flatten(0, 1), model.output_matrix(), targets)
    for logits, of_chunk in chunks:
        nats.append(functional.cross_entropy(logits, of_chunk, reduction="none"))
        right.append(logits.argmax(-1) == of_chunk)
    shape = segment.targets.shape
    losses = torch.cat(nats).view(shape).cpu().numpy()
    was_right = torch.cat(right).view(shape).cpu().numpy()
    return Predictions(losses.astype(np.float64), was_right)


@torch.no_grad()
def carried_through(
    model: Model,
    documents: Sequence[Document],
    lanes: int,
    clear_memory: bool = False,
    predict: bool = True,
) -> Iterator[Carried]:
    """Read documents with the state carried through each, segment by segment. Shows its progress.

    clear_memory: start every segment from the initial state
    predict: if it is false, nothing is predicted, which costs less
    """
    size = model.config.segment
    overlap = overlap_of(model.config)
    device = model.embedding.device
    lengths = lengths_of(documents)
    count = sum(count_windows(length + 1, size, overlap) for length in lengths.tolist())
    lanes = min(lanes, max(1, int(np.count_nonzero(lengths))))  # all have something to read

    state = model.initial_state(lanes)
    number = np.zeros(lanes, np.int64)
    predictions = NOT_PREDICTED
    with evaluating(model), Progress("evaluating", count, "segment") as bar:
        for segment, kept in one_pass(documents, lanes, size, overlap):
            state = keep_lanes(state, kept)
            number = np.where(segment.starts.numpy(), 0, number[kept] + 1)
            starts = (number == 0) | clear_memory
            if starts.any():
                initial = model.initial_state(len(starts))
                state = replace_lanes(torch.from_numpy(starts).to(device), initial, state)

            moved = segment.to(device)
            if predict:
                reading = model.read(moved.tokens, state)
                predictions = predictions_of(model, reading.hidden, moved)
                after = reading.state
            else:
                after = model.advance(moved.tokens, state)
            yield Carried(segment, number, state, predictions)
            state = after
            bar.update(len(segment.tokens))


def add_segment(
    score: Score,
    predictions: Predictions,
    segment: Segment,
    tokenizer: Tokenizer,
) -> Score:
    """Add the Score of a segment with its Predictions to score."""
    scored = segment.scored.numpy()
    targets = segment.targets.numpy()[scored]
    return Score(
        nats=score.nats + float(predictions.nats.sum()),
        tokens=score.tokens + int(scored.sum()),
        right=score.right + int(predictions.right.sum()),
        text_bytes=score.text_bytes + int(tokenizer.token_bytes[targets].sum()),
    )


def evaluate(
    model: Model,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    lanes: int,
    clear_memory: bool = False,
) -> Score:
    """The Score of documents; the state is carried through each.

    With clear_memory every segment starts from the initial state.
    """
    score = Score()
    for segment, _, _, predictions in carried_through(model, documents, lanes, clear_memory):
        score = add_segment(score, predictions, segment, tokenizer)
    return score


def check_numbers(record: object) -> None:
    """Raise InputError if a number, or a report's record, holds a NaN of the model.

    Rates without a scored token are NaN too and do not count.
    """
    if isinstance(record, dict):
        if record.get("tokens") != 0:
            check_numbers(list(record.values()))
    elif isinstance(record, list):
        for value in record:
            check_numbers(value)
    elif record != record:
        raise InputError(NAN)


def token_nats(
    model: Model, documents: Sequence[Document], lanes: int, clear_memory: bool = False
) -> list[np.ndarray]:
    """-log p of every target, (n - 1,) float64 for each document, NaN if it is not scored.

    Their sums equal evaluate's Score.
    """
    nats = [np.full(len(document.inputs), np.nan) for document in documents]
    for segment, _, _, predictions in carried_through(model, documents, lanes, clear_memory):
        assert segment.place is not None
        for lane, (document, first) in enumerate(segment.place.tolist()):
            scored = np.flatnonzero(segment.scored[lane].numpy())
            nats[document][first + scored] = predictions.nats[lane][scored]
    return nats


def score_record(score: Score, words: tuple[int, str] = (0, "")) -> dict:
    """A Score as plain values; words are (words of the original text, how they were counted)."""
    count, way = words
    record = {
        "bits_per_byte": score.bits_per_byte,
        "bits_per_token": score.bits_per_token,
        "perplexity": score.perplexity(score.tokens),
    }
    if count:
        record |= {"word_perplexity": score.perplexity(count), "words": count, "words_are": way}
    return record | {
        "nats": score.nats,
        "tokens": score.tokens,
        "text_bytes": score.text_bytes,
        "accuracy": score.accuracy,
    }


def score_lines(score: Score, words: tuple[int, str], total: int) -> list[str]:
    """The lines that show a Score of a split with `total` tokens to predict.

    words are those of score_record.
    """
    count, way = words
    lines = [
        f"bits per byte       {score.bits_per_byte:.4f}",
        f"bits per token      {score.bits_per_token:.4f}",
        f"perplexity          {score.perplexity(score.tokens):,.3f}",
    ]
    if count:
        of_words = f"{counted(count, 'word')} of the original text, {way}"
        lines.append(f"perplexity per word {score.perplexity(count):,.5g} ({of_words})")
    return [
        *lines,
        f"log-probability     {-score.nats:,.2f} nats",
        f"tokens scored       {score.tokens:,} of {total:,} in the split",
    ]


def as_cell(value: float, form: str) -> str:
    """A number as text, a dash if it is NaN."""
    return "-" if math.isnan(value) else f"{value:{form}}"


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """The Score of a split."""
    score = evaluate(run.model, run.documents, run.tokenizer, run.lane_count, options.clear_memory)
    words = run.words()
    total = run.count_predictions()
    lines = score_lines(score, words, total)
    record = score_record(score, words) | {"split_tokens": total}
    documents = run.splits[run.split]
    if isinstance(documents, RecallDocuments):
        chance = documents.config.chance
        record["chance"] = chance
        lines.append(f"right answers       {score.accuracy:.1%} (a guess {chance:.0%})")
    return record, lines
