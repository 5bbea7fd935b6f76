"""eval.py score: sums of log-probabilities, and counts. train.py and the other reports score documents by this file."""

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, functional

from accelerated.data.config import WIKITEXTS
from accelerated.data.lanes import Segment, joined_for_lanes, one_pass
from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document, Documents, count_windows, lengths_of
from accelerated.program.errors import InputError, counted
from accelerated.program.progress import Progress
from accelerated.protocol import evaluating, keep_lanes, overlap_of, replace_lanes
from accelerated.replay import logits_in_chunks, targets_of
from accelerated.training.settings import Settings

# PG-19: Compressive Transformers, Table 2. WikiText-103: Merity et al. (2016), which counts every line's end as a word; raw has
# as many, because <unk> is a word
WIKITEXT_WORDS = {"train": 103_227_021, "valid": 217_646, "test": 245_569}
PG19_WORDS = {"train": 1_973_136_207, "valid": 3_007_061, "test": 6_966_499}
OFFICIAL_WORDS = {"pg19": PG19_WORDS} | dict.fromkeys(WIKITEXTS, WIKITEXT_WORDS)
NAN = "the model's predictions are NaN: its numbers overflow; give another --checkpoint, or train again"


class TrainedRun(NamedTuple):
    """A run that eval.py has opened, and the documents to read."""

    path: str
    model: Module  # in evaluation mode
    settings: Settings
    checkpoint: dict
    tokenizer: Tokenizer
    lane_count: int  # lanes (rows of a batch) that read documents
    data: str = ""  # --data, or what the run was trained on
    splits: dict[str, Documents] | None = None  # one for most reports, None for sample
    carry_over: bool = False  # whether memory is carried over documents

    def to_read(self, split: str) -> Sequence[Document]:
        """What is read of a split: its documents, or parts of their joined text if memory is carried over documents."""
        documents, size = self.splits[split], self.model.config.segment
        return (
            joined_for_lanes(self.lane_count, documents, least=size)
            if self.carry_over
            else documents
        )

    def by_document(self, nats: list[np.ndarray]) -> list[np.ndarray]:
        """The losses of each document of the only split, from the token_nats of what was read of it."""
        if not self.carry_over:
            return nats
        lengths = lengths_of(
            self.splits[self.split]
        )  # a prediction of the next document's first token is after each
        parts = np.split(np.concatenate(nats), np.cumsum(lengths + (lengths > 0))[:-1])
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
        """How many tokens of the only split can be predicted: all but the first of each document."""
        return int(lengths_of(self.splits[self.split]).sum())

    def words(self, split: str | None = None) -> tuple[int, str]:
        """(Words in the text of a split, or of the only one; how they were counted): officially if that is as many, else here."""
        split = split or self.split
        own, line_ends = (
            int(np.sum(getattr(self.splits[split], name, 0))) for name in ("words", "line_ends")
        )
        official, line_ends = (
            OFFICIAL_WORDS.get(self.data, {}).get(split),
            line_ends if self.data in WIKITEXTS else 0,
        )
        return (
            (official, "official count")
            if own + line_ends == official
            else (own, "counted between white space")
        )


def ratio(total: float, count: int) -> float:
    """total / count, NaN if nothing was counted."""
    return total / count if count else math.nan


class Score(NamedTuple):
    """Sums over scored tokens, and rates computed from them, which are NaN if nothing was scored."""

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
        """exp(-sum of log p / units), per token or per word of the text; infinite if that is too large for a double."""
        exponent = ratio(self.nats, units)
        return math.inf if exponent > 700 else math.exp(exponent)


class Predictions(NamedTuple):
    """How well a model predicted each token of a segment, on the host."""

    nats: np.ndarray  # (B, N) float64, -log p of the target; 0 if it is not scored
    right: np.ndarray  # (B, N) bool, whether the target is scored and was the most probable token


def carries_nothing(model: Module) -> bool:
    """Whether the model's state is empty, so that segments are independent, as in plain GPT-2."""
    return not any(field.numel() for field in model.initial_state(1))


@torch.no_grad()
def predictions(model: Module, hidden: Tensor, segment: Segment) -> Predictions:
    """The Predictions of a segment from its Reading's hidden (B, N, D); logits are made in chunks.

    Losses are computed in float32 or better. They become float64 on the host: not every GPU has it.
    """
    chunks = logits_in_chunks(
        hidden.flatten(0, 1), model.output_matrix(), targets_of(segment).flatten()
    )
    parts = [
        (functional.cross_entropy(logits, aims, reduction="none"), logits.argmax(-1) == aims)
        for _, logits, aims in chunks
    ]
    nats, right = (
        torch.cat(part).view(segment.targets.shape).cpu().numpy()
        for part in zip(*parts, strict=True)
    )
    return Predictions(nats.astype(np.float64), right)


@torch.no_grad()
def carried_through(
    model: Module,
    documents: Sequence[Document],
    lanes: int,
    clear_every: int = 0,
    predict: bool = True,
) -> Iterator[tuple]:
    """Read documents with the state carried through each; yield (segment, its number (B,), the state before it, Predictions).

    The number counts a document's segments from 0. Only the state is on the model's device. Progress is shown.

    clear_every: every so many-th segment of a document starts with the initial state; with 1 all do
    predict: if it is false, the Predictions are None
    """
    size, overlap, device = (
        model.config.segment,
        overlap_of(model.config),
        next(model.parameters()).device,
    )
    lengths = lengths_of(documents)
    count = sum(count_windows(length + 1, size, overlap) for length in lengths.tolist())
    lanes = min(lanes, max(1, np.count_nonzero(lengths)))  # no more than have something to read
    state, number, made = model.initial_state(lanes), np.zeros(lanes, np.int64), None
    with evaluating(model), Progress("evaluating", count, "segment") as bar:
        for segment, kept in one_pass(documents, lanes, size, overlap):
            state, number = (
                keep_lanes(state, kept),
                np.where(segment.starts.numpy(), 0, number[kept] + 1),
            )
            starts = number % clear_every == 0 if clear_every else number == 0
            if starts.any():
                state = replace_lanes(
                    torch.from_numpy(starts).to(device), model.initial_state(len(starts)), state
                )
            moved = segment.to(device)
            if predict:
                reading = model.read(moved.tokens, state)
                made, after = predictions(model, reading.hidden, moved), reading.state
            else:
                after = model.advance(moved.tokens, state)
            yield segment, number, state, made
            state = after
            bar.update(len(segment.tokens))


def add_segment(
    score: Score,
    made: Predictions,
    segment: Segment,
    tokenizer: Tokenizer,
    lanes: slice | np.ndarray = slice(None),
) -> Score:
    """Add the Score of a segment with its Predictions, or of some of its lanes, to score."""
    nats, right, scored = (field[lanes] for field in (*made, segment.scored.numpy()))
    text_bytes = tokenizer.token_bytes[segment.targets.numpy()[lanes][scored]].sum()
    added = (float(nats.sum()), int(scored.sum()), int(right.sum()), int(text_bytes))
    return Score(*(a + b for a, b in zip(score, added, strict=True)))


def evaluate(
    model: Module,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    lanes: int,
    clear_memory: bool = False,
) -> Score:
    """The Score of documents; the state is carried through each, or with clear_memory starts anew at every segment."""
    score = Score()
    for segment, _, _, made in carried_through(model, documents, lanes, int(clear_memory)):
        score = add_segment(score, made, segment, tokenizer)
    return score


def check_score(score: Score) -> Score:
    """Return the score; raises InputError if it is NaN."""
    if math.isnan(score.nats):
        raise InputError(NAN)
    return score


def token_nats(
    model: Module, documents: Sequence[Document], lanes: int, clear_memory: bool = False
) -> list[np.ndarray]:
    """-log p of every target, (n - 1,) float64 for each document, NaN if it is not scored; their sums equal evaluate's Score."""
    nats = [np.full(len(document.inputs), np.nan) for document in documents]
    for segment, _, _, made in carried_through(model, documents, lanes, int(clear_memory)):
        for (document, first), losses, scored in zip(
            segment.place.tolist(), made.nats, segment.scored.numpy(), strict=True
        ):
            nats[document][first + np.flatnonzero(scored)] = losses[scored]
    return nats


def score_record(score: Score, words: tuple[int, str] = (0, "")) -> dict:
    """A Score as plain values; words are (words of the original text, how they were counted)."""
    per_word = (
        {"word_perplexity": score.perplexity(words[0]), "words": words[0], "words_are": words[1]}
        if words[0]
        else {}
    )
    rates = {"bits_per_byte": score.bits_per_byte, "bits_per_token": score.bits_per_token}
    rates |= {"perplexity": score.perplexity(score.tokens)} | per_word
    return rates | {
        "nats": score.nats,
        "tokens": score.tokens,
        "text_bytes": score.text_bytes,
        "accuracy": score.accuracy,
    }


def score_lines(score: Score, words: tuple[int, str], total: int) -> list[str]:
    """The lines that show a Score of a split with `total` tokens to predict; words as for score_record."""
    lines = [
        f"bits per byte       {score.bits_per_byte:.4f}",
        f"bits per token      {score.bits_per_token:.4f}",
    ]
    lines.append(f"perplexity          {score.perplexity(score.tokens):,.3f}")
    if words[0]:
        of_words = f"{counted(words[0], 'word')} of the original text, {words[1]}"
        lines.append(f"per word            {score.perplexity(words[0]):,.5g} ({of_words})")
    lines.append(f"log-probability     {-score.nats:,.2f} nats")
    return [*lines, f"tokens scored       {score.tokens:,} of {total:,} in the split"]


def as_cell(value: float, form: str) -> str:
    """A number as text, a dash if it is NaN."""
    return "-" if math.isnan(value) else f"{value:{form}}"


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The Score of a split."""
    score = evaluate(run.model, run.documents, run.tokenizer, run.lane_count, options.clear_memory)
    words, total = run.words(), run.count_predictions()
    lines = score_lines(score, words, total)
    if run.data == "recall":
        lines.append(
            f"right answers       {score.accuracy:.1%} (chance {1 / run.settings.recall.values:.0%})"
        )
    return score_record(score, words) | {"split_tokens": total}, lines
