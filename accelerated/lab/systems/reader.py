"""RoBERTa with recurrence answers two_hops.py's questions: their windows, the pretraining, the fine-tuning and the answers.

A question's windows are [CLS] question [SEP] text [SEP], N tokens each; the last one is padded. K windows, N tokens in a window.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from accelerated.data.tokenizers import SpelledTokenizer
from accelerated.lab.systems.roberta import Roberta
from accelerated.lab.systems.two_hops import KINDS, Question, place_of_answer, text_of
from accelerated.program.progress import Progress
from accelerated.training.optimization import check_finite

LONGEST = 30  # tokens of an answer
MASKED = 0.15  # share of the tokens that the pretraining asks for
AS_MASK, AS_ANOTHER = 0.8, 0.1  # of those, what is read as <mask>, and as any token; the rest as it is
WARMUP = 0.06  # share of the updates in which the rate rises; then it falls to 0, both in a line, as RoBERTa's
CLIP = 1.0  # of the gradient's norm
LANES = 32  # examples read at a time when answering


class Tokenizer(NamedTuple):
    """RoBERTa's tokens: those of a byte-level BPE, whose ids begin at `first`, and [CLS], padding, [SEP] and <mask>."""

    bpe: SpelledTokenizer
    first: int
    cls: int
    pad: int
    sep: int
    mask: int

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text."""
        return self.bpe.encode(text) + self.first


class Example(NamedTuple):
    """A question as windows of tokens."""

    question: Question
    tokens: np.ndarray  # (K, N)
    readable: np.ndarray  # (K, N), false on padding
    text: np.ndarray  # (K, N), true on tokens of the text
    spelled: bytes  # the text
    ends: np.ndarray  # (tokens of the text,), where each ends among the bytes
    answer: tuple[int, int, int] | None  # kind, first and last place among all K N; None if it is unknown or not in the text
    distance: int  # windows from the end of the first supporting sentence in the text to that of the last


class Task(NamedTuple):
    """What the rows are trained and asked on."""

    model: Callable[[bool, int], Roberta]  # (recurrent, seed) to a pretrained model
    pad: int  # token id
    stages: list[tuple[list[Example], int]]  # training questions and updates, one after another
    asked: list[Example]
    batch: int
    rate: float


def cut(question: Question, tokenizer: Tokenizer, segment: int) -> Example:
    """The Example of a question in windows of `segment` tokens, at least 6; the question keeps at most half of them.

    So text has at least `segment` / 2 - 1 tokens of every window, whatever is asked.
    """
    text, sentences = text_of(question)
    ids = tokenizer.encode(text)
    ends = tokenizer.bpe.token_bytes[ids - tokenizer.first].cumsum()
    prefix = [tokenizer.cls, *tokenizer.encode(question.question)[: segment // 2 - 2], tokenizer.sep]
    room = segment - len(prefix) - 1
    windows = -(-len(ids) // room)
    tokens, of_text = np.full((windows, segment), tokenizer.pad), np.zeros((windows, segment), bool)
    of_text[:, len(prefix) : -1] = np.arange(windows * room).reshape(windows, room) < len(ids)
    tokens[:, : len(prefix)], tokens[of_text] = prefix, ids
    filled = len(prefix) + of_text.sum(1)  # (K,)
    tokens[np.arange(windows), filled] = tokenizer.sep
    readable = np.arange(segment) <= filled[:, None]

    def place(character: int, side: str = "left") -> int:
        """The place among all K N of the token in which a character ends; with the side right, in which it begins."""
        token = np.searchsorted(ends, len(text[:character].encode()), side=side)
        return int(np.flatnonzero(of_text)[token])

    answer = (1 + KINDS.index(question.answer), 0, 0) if question.answer in KINDS else None
    if answer is None and (at := place_of_answer(question)):
        answer = 0, place(at[0], "right"), place(at[1])
    facts = sorted(sentences[fact] for fact in question.supporting_facts if fact in sentences)
    distance = place(facts[-1][1]) // segment - place(facts[0][1]) // segment if facts else 0
    return Example(question, tokens, readable, of_text, text.encode(), ends, answer, distance)


def batched(examples: Sequence[Example], pad: int, device: torch.device) -> list:
    """The K windows (tokens, readable, text), (B, N) each, of examples; those with fewer windows end early."""
    count, (_, segment) = max(len(example.tokens) for example in examples), examples[0].tokens.shape
    fields = []
    for name, empty in (("tokens", pad), ("readable", False), ("text", False)):
        field = np.full((count, len(examples), segment), empty)
        for lane, example in enumerate(examples):
            field[: len(example.tokens), lane] = getattr(example, name)
        fields.append(torch.from_numpy(field).to(device))
    return list(zip(*fields, strict=True))


def best_span(start: np.ndarray, end: np.ndarray, longest: int = LONGEST) -> tuple[int, int]:
    """The (first, last) of at most `longest` tokens with the greatest sum of logits (n,)."""
    padded = np.concatenate([end, np.full(longest - 1, -np.inf)])
    sums = start[:, None] + np.lib.stride_tricks.sliding_window_view(padded, longest)  # (n, longest)
    first, more = divmod(int(sums.argmax()), longest)
    return first, first + more


def answer_text(example: Example, spans: np.ndarray, kinds: np.ndarray) -> str:
    """The answer to an example by its logits: spans (2, K N) and kinds (3,)."""
    if kind := int(kinds.argmax()):
        return KINDS[kind - 1]
    first, last = best_span(*spans[:, : example.text.size][:, example.text.ravel()])
    begin = example.ends[first - 1] if first else 0
    return example.spelled[begin : example.ends[last]].decode(errors="ignore").strip()


@torch.no_grad()
def answers(model: Roberta, examples: Sequence[Example], pad: int) -> Iterator[str]:
    """Yield the model's answer to each example."""
    model.eval()
    for at in range(0, len(examples), LANES):
        some = examples[at : at + LANES]
        spans, kinds = (logits.cpu().numpy() for logits in model.read(batched(some, pad, model.embedding.device)))
        yield from map(answer_text, some, spans, kinds)


def masked(tokens: np.ndarray, tokenizer: Tokenizer, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(tokens as they are read, which are asked for), both (B, N), of windows that begin with [CLS] and end with [SEP]."""
    draw, how = rng.random((2, *tokens.shape))
    scored = draw < MASKED
    scored[:, 0] = scored[:, -1] = False
    scored[0, 1] |= not scored.any()
    read = np.where(scored & (how < AS_MASK), tokenizer.mask, tokens)
    another = tokenizer.first + rng.integers(tokenizer.bpe.vocabulary, size=tokens.shape)
    return np.where(scored & (how >= AS_MASK) & (how < AS_MASK + AS_ANOTHER), another, read), scored


def pretrain(model: Roberta, ranks: np.ndarray, tokenizer: Tokenizer, updates: int, batch: int, rate: float) -> list[float]:
    """Train on windows from anywhere in a text, ranks (tokens,) of the BPE; returns the loss of each update, in nats."""
    rng, room = np.random.default_rng(0), model.config.segment - 2

    def losses() -> Iterator[torch.Tensor]:
        while True:
            starts = rng.integers(len(ranks) - room, size=(batch, 1))
            targets = np.full((batch, room + 2), tokenizer.cls)
            targets[:, 1:-1], targets[:, -1] = ranks[starts + np.arange(room)], tokenizer.sep
            targets[:, 1:-1] += tokenizer.first
            read, scored = masked(targets, tokenizer, rng)
            yield model.masked_loss(*(torch.from_numpy(field).to(model.embedding.device) for field in (read, targets, scored)))

    return train(model, losses(), updates, rate, "pretraining")


def fine_tune(
    model: Roberta, examples: Sequence[Example], pad: int, updates: int, batch: int, rate: float, seed: int, title: str
) -> list[float]:
    """Train on examples that have an answer, pass after pass in a new order; returns the loss, in nats, of each update."""
    rng, device = np.random.default_rng(seed), model.embedding.device
    order = np.concatenate([rng.permutation(len(examples)) for _ in range(-(-updates * batch // len(examples)))])

    def losses() -> Iterator[torch.Tensor]:
        for at in range(0, updates * batch, batch):
            some = [examples[number] for number in order[at : at + batch]]
            answer = torch.tensor([example.answer for example in some], device=device)  # (B, 3)
            yield model.answer_loss(batched(some, pad, device), answer[:, 0], answer[:, 1:])

    return train(model, losses(), updates, rate, title)


def train(model: Roberta, losses: Iterator[torch.Tensor], updates: int, rate: float, title: str) -> list[float]:
    """Update a model with Adam; returns the losses. Raises InputError if one becomes NaN or infinite."""
    optimizer, values = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98), eps=1e-6), []
    warmup = max(1, round(WARMUP * updates))
    model.train()
    for update in Progress(title, updates, "update", over=range(1, updates + 1)):
        optimizer.param_groups[0]["lr"] = rate * min(update / warmup, (updates - update + 1) / (updates - warmup + 1))
        optimizer.zero_grad()
        loss = next(losses)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        values.append(loss.item())
        check_finite(update, {"loss": values[-1], "gradient norm": float(norm)}, lambda: "this model was not kept")
        optimizer.step()
    return values
