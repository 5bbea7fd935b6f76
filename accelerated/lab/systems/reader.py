"""RoBERTa with recurrence answers questions of two hops: windows, training and answers.

A question's windows are [CLS] question [SEP] text [SEP], N tokens each; the last one is padded.
K windows, N tokens in a window.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from accelerated.data.tokenizers import Tokenizer
from accelerated.lab.systems.roberta import Roberta, Window
from accelerated.lab.systems.two_hops import KINDS, Question
from accelerated.program.progress import Progress
from accelerated.training.optimization import check_finite, set_learning_rate

# ids: special tokens as in RoBERTa's vocabulary, then the BPE's tokens
CLS, PAD, SEP, FIRST = range(4)
LONGEST = 30  # tokens of an answer
WARMUP = 0.06  # share of the updates in which the rate rises; then it falls to 0, both in a line
CLIP = 1.0  # of the gradient's norm
LANES = 32  # examples read at a time when answering


class Example(NamedTuple):
    """A question as windows of tokens."""

    question: Question
    tokens: np.ndarray  # (K, N)
    text: np.ndarray  # (K, N), true on tokens of the text
    ends: np.ndarray  # (tokens of the text,), where each ends among the text's bytes
    answer: tuple[int, int, int]  # kind, first and last place among all K N; no span's are 0


def answer_start(question: Question) -> int:
    """The character at which a span begins: in the last hop that has it, or else the first such.

    It is -1 if the text does not have the answer. Decision Q5: the last hop.
    """
    for hop in reversed(question.hops):
        start = question.text.find(question.answer, *hop)
        if start >= 0:
            return start
    return question.text.find(question.answer)


def cut(question: Question, bpe: Tokenizer, segment: int, first: int = FIRST) -> Example:
    """The Example of a question in windows of `segment` tokens, at least 6.

    The question keeps at most half of them. So text has at least `segment` / 2 - 1 tokens of every
    window, whatever is asked. first is the id of the BPE's rank 0.
    """
    ranks = bpe.encode(question.text)
    asked = bpe.encode(question.question)[: segment // 2 - 2] + first
    prefix = [CLS, *asked, SEP]
    room = segment - len(prefix) - 1
    pieces = np.split(ranks + first, range(room, len(ranks), room))
    tokens = np.full((len(pieces), segment), PAD)
    of_text = np.zeros(tokens.shape, bool)
    for window, piece in enumerate(pieces):
        read = [*prefix, *piece, SEP]
        tokens[window, : len(read)] = read
        of_text[window, len(prefix) : len(read) - 1] = True

    ends = bpe.token_bytes[ranks].cumsum()
    places = np.flatnonzero(of_text)

    def place(character: int, side: Literal["left", "right"] = "left") -> int:
        """The place among all K N of the token in which a character ends.

        With the side right, in which it begins.
        """
        return int(places[np.searchsorted(ends, len(question.text[:character].encode()), side)])

    answer = 0, 0, 0  # of a span that the text does not have
    begin = answer_start(question)
    if question.answer in KINDS:
        answer = 1 + KINDS.index(question.answer), 0, 0
    elif begin >= 0:
        answer = 0, place(begin, "right"), place(begin + len(question.answer))
    return Example(question, tokens, of_text, ends, answer)


def batched(examples: Sequence[Example], device: torch.device | None = None) -> list[Window]:
    """The K windows of examples on a device; those with fewer windows end early."""
    tokens = [torch.from_numpy(example.tokens) for example in examples]
    text = [torch.from_numpy(example.text) for example in examples]
    tokens = pad_sequence(tokens, padding_value=PAD).to(device)  # (K, B, N)
    return list(map(Window, tokens, tokens != PAD, pad_sequence(text).to(device)))


def best_span(start: np.ndarray, end: np.ndarray, longest: int = LONGEST) -> tuple[int, int]:
    """The (first, last) of at most `longest` tokens with the greatest sum of logits (n,)."""
    padded = np.concatenate([end, np.full(longest - 1, -np.inf)])
    ends = np.lib.stride_tricks.sliding_window_view(padded, longest)  # (n, longest)
    first, more = divmod(int((start[:, None] + ends).argmax()), longest)
    return first, first + more


def answer_text(example: Example, spans: np.ndarray, kinds: np.ndarray) -> str:
    """The answer to an example by its logits: spans (2, K N) and kinds (3,)."""
    kind = int(kinds.argmax())
    if kind > 0:
        return KINDS[kind - 1]
    start, end = spans[:, : example.text.size][:, example.text.ravel()]
    first, last = best_span(start, end)
    begin = example.ends[first - 1] if first else 0
    answer = example.question.text.encode()[begin : example.ends[last]]
    return answer.decode(errors="ignore").strip()


@torch.no_grad()
def answers(model: Roberta, examples: Sequence[Example]) -> Iterator[str]:
    """Yield the model's answer to each example."""
    model.eval()
    for at in range(0, len(examples), LANES):
        some = examples[at : at + LANES]
        spans, kinds = model.read(batched(some, model.kind.weight.device))
        yield from map(answer_text, some, spans.cpu().numpy(), kinds.cpu().numpy())


def fine_tune(
    model: Roberta,
    examples: Sequence[Example],
    updates: int,
    batch: int,
    rate: float,
    seed: int,
    title: str,
) -> None:
    """Train with Adam on examples, pass after pass in a new order.

    Raises InputError if a loss becomes NaN or infinite.
    """
    rng = np.random.default_rng(seed)
    passes = math.ceil(updates * batch / len(examples))
    order = np.concatenate([rng.permutation(len(examples)) for _ in range(passes)])
    device = model.kind.weight.device
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98), eps=1e-6)
    warmup = max(1, round(WARMUP * updates))
    model.train()
    for update in Progress(title, updates, "update", over=range(1, updates + 1)):
        rising = update / warmup
        falling = (updates - update + 1) / (updates - warmup + 1)
        set_learning_rate(optimizer, rate * min(rising, falling))
        some = [examples[number] for number in order[(update - 1) * batch : update * batch]]
        answer = torch.tensor([example.answer for example in some], device=device)  # (B, 3)
        loss = model.answer_loss(batched(some, device), answer[:, 0], answer[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        check_finite(update, {"loss": loss.item(), "gradient norm": float(norm)})
        optimizer.step()
