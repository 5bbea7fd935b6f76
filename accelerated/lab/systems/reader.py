"""RoBERTa with recurrence answers questions of two hops: windows, training and answers.

A question's windows are [CLS] question [SEP] text [SEP], N tokens each; the last one is padded.
K windows, N tokens in a window.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from accelerated.data.tokenizers import Tokenizer
from accelerated.lab.systems.roberta import Roberta, Window
from accelerated.lab.systems.two_hops import KINDS, Question
from accelerated.program.progress import Progress
from accelerated.training.optimization import check_finite, set_learning_rate

# ids: special tokens as in RoBERTa's vocabulary, then the BPE's tokens, then <mask>
CLS, PAD, SEP, FIRST = range(4)
LONGEST = 30  # tokens of an answer
MASKED = 0.15  # share of the tokens that the pretraining asks for
AS_MASK = 0.8  # of those, what is read as <mask>
AS_ANOTHER = 0.1  # and as any token; the rest is read as it is
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
    distance: int  # windows between the ends of the first and the last supporting sentence


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
    hops = [place(end) // segment for _, end in question.hops] or [0]
    return Example(question, tokens, of_text, ends, answer, max(hops) - min(hops))


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


def masked(
    tokens: np.ndarray, vocabulary: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens as they are read, which are asked for), both (B, N).

    The windows begin with [CLS] and end with [SEP]. vocabulary is the BPE's.
    """
    draw, how = rng.random((2, *tokens.shape))
    scored = draw < MASKED
    scored[:, [0, -1]] = False
    scored[0, 1] |= not scored.any()
    another = FIRST + rng.integers(vocabulary, size=tokens.shape)
    changed = np.where(how < AS_MASK, FIRST + vocabulary, another)
    return np.where(scored & (how < AS_MASK + AS_ANOTHER), changed, tokens), scored


def pretrain(
    model: Roberta, ranks: np.ndarray, segment: int, updates: int, batch: int, rate: float
) -> list[float]:
    """Train on windows from anywhere in a text, ranks (tokens,) of the BPE.

    Returns the loss of each update, in nats.
    """
    rng = np.random.default_rng(0)
    pieces = np.lib.stride_tricks.sliding_window_view(ranks, segment - 2)
    vocabulary = model.masked.config.vocab_size - FIRST - 1

    def loss_of(update: int) -> Tensor:
        drawn = FIRST + pieces[rng.integers(len(pieces), size=batch)].astype(np.int64)
        targets = np.pad(drawn, ((0, 0), (1, 1)), constant_values=((0, 0), (CLS, SEP)))
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
    """Train on examples, pass after pass in a new order.

    Returns the loss, in nats, of each update.
    """
    rng = np.random.default_rng(seed)
    passes = math.ceil(updates * batch / len(examples))
    order = np.concatenate([rng.permutation(len(examples)) for _ in range(passes)])
    device = model.kind.weight.device

    def loss_of(update: int) -> Tensor:
        some = [examples[number] for number in order[(update - 1) * batch : update * batch]]
        answer = torch.tensor([example.answer for example in some], device=device)  # (B, 3)
        return model.answer_loss(batched(some, device), answer[:, 0], answer[:, 1:])

    return train(model, loss_of, updates, rate, title)


def train(
    model: Roberta, loss_of: Callable[[int], Tensor], updates: int, rate: float, title: str
) -> list[float]:
    """Update a model with Adam; returns the loss of each update, from 1.

    Raises InputError if one becomes NaN or infinite.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98), eps=1e-6)
    warmup = max(1, round(WARMUP * updates))
    values = []
    model.train()
    for update in Progress(title, updates, "update", over=range(1, updates + 1)):
        rising = update / warmup
        falling = (updates - update + 1) / (updates - warmup + 1)
        set_learning_rate(optimizer, rate * min(rising, falling))
        loss = loss_of(update)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        values.append(loss.item())
        check_finite(update, {"loss": values[-1], "gradient norm": float(norm)})
        optimizer.step()
    return values
