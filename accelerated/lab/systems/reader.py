"""RoBERTa with recurrence answers two_hops.py's questions: their windows, the pretraining, the fine-tuning and the answers.

A question's windows are [CLS] question [SEP] text [SEP], N tokens each; the last one is padded. K windows, N tokens in a window.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from accelerated.data.tokenizers import Tokenizer
from accelerated.lab.systems.roberta import Roberta
from accelerated.lab.systems.two_hops import KINDS, Question
from accelerated.program.progress import Progress
from accelerated.training.optimization import check_finite

CLS, PAD, SEP, FIRST = range(
    4
)  # ids: special tokens as in RoBERTa's vocabulary, then the BPE's tokens, then <mask>
LONGEST = 30  # tokens of an answer
MASKED = 0.15  # share of the tokens that the pretraining asks for
AS_MASK, AS_ANOTHER = (
    0.8,
    0.1,
)  # of those, what is read as <mask>, and as any token; the rest as it is
WARMUP = 0.06  # share of the updates in which the rate rises; then it falls to 0, both in a line, as RoBERTa's
CLIP = 1.0  # of the gradient's norm
LANES = 32  # examples read at a time when answering


class Example(NamedTuple):
    """A question as windows of tokens."""

    question: Question
    tokens: np.ndarray  # (K, N)
    text: np.ndarray  # (K, N), true on tokens of the text
    ends: np.ndarray  # (tokens of the text,), where each ends among the text's bytes
    answer: tuple[
        int, int, int
    ]  # kind, first and last place among all K N; without a span the places are 0
    distance: (
        int  # windows from the end of the first supporting sentence in the text to that of the last
    )


def cut(question: Question, bpe: Tokenizer, segment: int) -> Example:
    """The Example of a question in windows of `segment` tokens, at least 6; the question keeps at most half of them.

    So text has at least `segment` / 2 - 1 tokens of every window, whatever is asked.
    """
    text, ranks = question.text, bpe.encode(question.text)
    ends = bpe.token_bytes[ranks].cumsum()
    prefix = [CLS, *(bpe.encode(question.question)[: segment // 2 - 2] + FIRST), SEP]
    room = segment - len(prefix) - 1
    windows = -(-len(ranks) // room)
    tokens, of_text = np.full((windows, segment), PAD), np.zeros((windows, segment), bool)
    of_text[:, len(prefix) : -1] = np.arange(windows * room).reshape(windows, room) < len(ranks)
    tokens[:, : len(prefix)], tokens[of_text] = prefix, ranks + FIRST
    tokens[np.arange(windows), len(prefix) + of_text.sum(1)] = SEP

    def place(character: int, side: str = "left") -> int:
        """The place among all K N of the token in which a character ends; with the side right, in which it begins."""
        token = np.searchsorted(ends, len(text[:character].encode()), side=side)
        return int(np.flatnonzero(of_text)[token])

    if question.answer in KINDS:
        answer = 1 + KINDS.index(question.answer), 0, 0
    else:
        begin = text.index(question.answer, *question.hops[-1])
        answer = 0, place(begin, "right"), place(begin + len(question.answer))
    of_hops = [place(end) // segment for _, end in question.hops]
    return Example(question, tokens, of_text, ends, answer, max(of_hops) - min(of_hops))


def batched(examples: Sequence[Example]) -> list:
    """The K windows (tokens, readable, text), (B, N) each, of examples; those with fewer windows end early."""
    tokens = pad_sequence(
        [torch.from_numpy(example.tokens) for example in examples], padding_value=PAD
    )  # (K, B, N)
    text = pad_sequence([torch.from_numpy(example.text) for example in examples])
    return list(zip(tokens, tokens != PAD, text, strict=True))


def best_span(start: np.ndarray, end: np.ndarray, longest: int = LONGEST) -> tuple[int, int]:
    """The (first, last) of at most `longest` tokens with the greatest sum of logits (n,)."""
    padded = np.concatenate([end, np.full(longest - 1, -np.inf)])
    sums = start[:, None] + np.lib.stride_tricks.sliding_window_view(
        padded, longest
    )  # (n, longest)
    first, more = divmod(int(sums.argmax()), longest)
    return first, first + more


def answer_text(example: Example, spans: np.ndarray, kinds: np.ndarray) -> str:
    """The answer to an example by its logits: spans (2, K N) and kinds (3,)."""
    if kind := int(kinds.argmax()):
        return KINDS[kind - 1]
    first, last = best_span(*spans[:, : example.text.size][:, example.text.ravel()])
    begin = example.ends[first - 1] if first else 0
    return (
        example.question.text.encode()[begin : example.ends[last]].decode(errors="ignore").strip()
    )


@torch.no_grad()
def answers(model: Roberta, examples: Sequence[Example]) -> Iterator[str]:
    """Yield the model's answer to each example."""
    model.eval()
    for at in range(0, len(examples), LANES):
        some = examples[at : at + LANES]
        spans, kinds = (logits.numpy() for logits in model.read(batched(some)))
        yield from map(answer_text, some, spans, kinds)


def masked(
    tokens: np.ndarray, vocabulary: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens as they are read, which are asked for), both (B, N), of windows that begin with [CLS] and end with [SEP].

    vocabulary is the BPE's.
    """
    draw, how = rng.random((2, *tokens.shape))
    scored = draw < MASKED
    scored[:, 0] = scored[:, -1] = False
    scored[0, 1] |= not scored.any()
    read = np.where(scored & (how < AS_MASK), FIRST + vocabulary, tokens)
    another = FIRST + rng.integers(vocabulary, size=tokens.shape)
    return np.where(scored & (how >= AS_MASK) & (how < AS_MASK + AS_ANOTHER), another, read), scored


def pretrain(
    model: Roberta, ranks: np.ndarray, updates: int, batch: int, rate: float
) -> list[float]:
    """Train on windows from anywhere in a text, ranks (tokens,) of the BPE; returns the loss of each update, in nats."""
    rng, room, vocabulary = (
        np.random.default_rng(0),
        model.config.segment - 2,
        model.config.vocabulary - FIRST - 1,
    )

    def loss_of(update: int) -> torch.Tensor:
        starts = rng.integers(len(ranks) - room, size=(batch, 1))
        targets = np.full((batch, room + 2), CLS)
        targets[:, 1:-1], targets[:, -1] = ranks[starts + np.arange(room)], SEP
        targets[:, 1:-1] += FIRST
        read, scored = masked(targets, vocabulary, rng)
        return model.masked_loss(*map(torch.from_numpy, (read, targets, scored)))

    return train(model, loss_of, updates, rate, "pretraining")


def fine_tune(
    model: Roberta,
    examples: Sequence[Example],
    updates: int,
    batch: int,
    rate: float,
    seed: int,
    title: str,
) -> list[float]:
    """Train on examples, pass after pass in a new order; returns the loss, in nats, of each update."""
    rng = np.random.default_rng(seed)
    order = np.concatenate(
        [rng.permutation(len(examples)) for _ in range(-(-updates * batch // len(examples)))]
    )

    def loss_of(update: int) -> torch.Tensor:
        some = [examples[number] for number in order[(update - 1) * batch : update * batch]]
        answer = torch.tensor([example.answer for example in some])  # (B, 3)
        return model.answer_loss(batched(some), answer[:, 0], answer[:, 1:])

    return train(model, loss_of, updates, rate, title)


def train(
    model: Roberta, loss_of: Callable[[int], torch.Tensor], updates: int, rate: float, title: str
) -> list[float]:
    """Update a model with Adam; returns the loss of each update, from 1. Raises InputError if one becomes NaN or infinite."""
    optimizer, values = (
        torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98), eps=1e-6),
        [],
    )
    warmup = max(1, round(WARMUP * updates))
    model.train()
    for update in Progress(title, updates, "update", over=range(1, updates + 1)):
        optimizer.param_groups[0]["lr"] = rate * min(
            update / warmup, (updates - update + 1) / (updates - warmup + 1)
        )
        optimizer.zero_grad()
        loss = loss_of(update)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        values.append(loss.item())
        check_finite(update, {"loss": values[-1], "gradient norm": float(norm)})
        optimizer.step()
    return values
