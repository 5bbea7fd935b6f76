"""RoBERTa with recurrence answers questions.py's questions: their windows, the pretraining, the fine-tuning and the answers.

A question's windows are [CLS] question [SEP] text [SEP], N tokens each; the last one is padded. K windows, N tokens in a window.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from accelerated.lab.systems.questions import KINDS, Question, Text, place_of_answer, text_of
from accelerated.lab.systems.roberta import Answer, Roberta
from accelerated.lab.systems.roberta_tokens import RobertaTokenizer
from accelerated.training.optimization import check_finite

LONGEST = 30  # tokens of an answer
MASKED = 0.15  # share of the tokens that the pretraining asks for
AS_MASK, AS_ANOTHER = 0.8, 0.1  # of those, what is read as <mask>, and as any token; the rest as it is
WARMUP = 0.06  # share of the updates in which the rate rises; then it falls to 0, both in a line, as RoBERTa's
CLIP = 1.0  # of the gradient's norm
LANES = 32  # examples read at a time when answering


class Example(NamedTuple):
    """A question as windows of tokens."""

    question: Question
    tokens: np.ndarray  # (K, N)
    readable: np.ndarray  # (K, N), false on padding
    text: np.ndarray  # (K, N), true on tokens of the text
    spelled: bytes  # the text
    ends: np.ndarray  # (tokens of the text,), where each ends among the bytes
    answer: tuple[int, int, int] | None  # kind, start and end as in roberta.Answer; None if it is unknown or not in the text


def cut(question: Question, tokenizer: RobertaTokenizer, segment: int) -> Example:
    """The Example of a question in windows of `segment` tokens, at least 6; the question keeps at most half of them.

    So text has at least `segment` / 2 - 1 tokens of every window, whatever is asked.
    """
    text = text_of(question)
    ids, ends = tokenizer.ends(text.text)
    prefix = [tokenizer.cls, *tokenizer.encode(question.question)[: segment // 2 - 2], tokenizer.sep]
    room = segment - len(prefix) - 1
    windows = -(-len(ids) // room)
    tokens = np.full((windows, segment), tokenizer.pad)
    own = np.zeros((windows, segment), bool)
    own[:, len(prefix) : -1] = np.arange(windows * room).reshape(windows, room) < len(ids)
    tokens[:, : len(prefix)], tokens[own] = prefix, ids
    filled = len(prefix) + own.sum(1)  # (K,)
    tokens[np.arange(windows), filled] = tokenizer.sep
    readable = np.arange(segment) <= filled[:, None]
    return Example(question, tokens, readable, own, text.text.encode(), ends, located(question, text, own, ends))


def located(question: Question, text: Text, own: np.ndarray, ends: np.ndarray) -> tuple[int, int, int] | None:
    """Kind, first and last place of the answer's tokens among all K N; the places of yes and no are 0."""
    if question.answer in KINDS:
        return 1 + KINDS.index(question.answer), 0, 0
    characters = place_of_answer(question, text)
    if characters is None:
        return None
    begin, end = (len(text.text[:at].encode()) for at in characters)
    first, last = np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end)
    places = np.flatnonzero(own)
    return 0, int(places[first]), int(places[last])


def distance(example: Example) -> int:
    """Windows from the end of the first supporting sentence in the text to that of the last; 0 if they end in one window."""
    text, windows = text_of(example.question), np.flatnonzero(example.text) // example.text.shape[1]
    places = [text.sentences[fact] for fact in example.question.supporting_facts if fact in text.sentences]
    if not places:
        return 0
    ended = (len(text.text[:end].encode()) for _, end in (min(places), max(places)))
    first, last = (int(windows[np.searchsorted(example.ends, end)]) for end in ended)
    return last - first


def batched(examples: Sequence[Example], pad: int, device: torch.device) -> list:
    """The K windows (tokens, readable, text), (B, N) each, of examples; those with fewer windows end early."""
    count, (_, segment) = max(len(example.tokens) for example in examples), examples[0].tokens.shape
    fields = []
    for name, empty in (("tokens", pad), ("readable", False), ("text", False)):
        field = np.full((count, len(examples), segment), empty)
        for lane, example in enumerate(examples):
            own = getattr(example, name)
            field[: len(own), lane] = own
        fields.append(torch.from_numpy(field).to(device))
    return list(zip(*fields, strict=True))


def answers_of(examples: Sequence[Example], device: torch.device) -> Answer:
    """What the loss asks of examples that have an answer."""
    return Answer(*torch.tensor([example.answer for example in examples], device=device).T)


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
    start, end = spans[:, : example.text.size][:, example.text.ravel()]
    first, last = best_span(start, end)
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


def masked(tokens: np.ndarray, tokenizer: RobertaTokenizer, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(tokens as they are read, which are asked for), both (B, N), of windows that begin with [CLS] and end with [SEP]."""
    draw, how = rng.random((2, *tokens.shape))
    scored = draw < MASKED
    scored[:, 0] = scored[:, -1] = False
    scored[0, 1] |= not scored.any()
    read = np.where(scored & (how < AS_MASK), tokenizer.mask, tokens)
    another = tokenizer.ids[rng.integers(len(tokenizer.ids), size=tokens.shape)]
    return np.where(scored & (how >= AS_MASK) & (how < AS_MASK + AS_ANOTHER), another, read), scored


class Training(NamedTuple):
    """How long and how fast a model is trained."""

    updates: int
    batch: int
    learning_rate: float


def pretrain(model: Roberta, ranks: np.ndarray, tokenizer: RobertaTokenizer, training: Training, seed: int) -> Iterator[float]:
    """Train on windows from anywhere in a text, ranks (tokens,) of the BPE; yield the loss of each update, in nats."""
    rng, room = np.random.default_rng(seed), model.config.segment - 2

    def loss() -> torch.Tensor:
        starts = rng.integers(len(ranks) - room, size=(training.batch, 1))
        targets = np.full((training.batch, room + 2), tokenizer.cls)
        targets[:, 1:-1], targets[:, -1] = tokenizer.ids[ranks[starts + np.arange(room)]], tokenizer.sep
        read, scored = masked(targets, tokenizer, rng)
        return model.masked_loss(*(torch.from_numpy(field).to(model.embedding.device) for field in (read, targets, scored)))

    return updated(model, loss, training)


def fine_tune(model: Roberta, examples: Sequence[Example], pad: int, training: Training, seed: int) -> Iterator[float]:
    """Train on examples that have an answer, pass after pass in a new order; yield the loss, in nats, of each update."""
    rng, waiting, device = np.random.default_rng(seed), [], model.embedding.device

    def loss() -> torch.Tensor:
        while len(waiting) < training.batch:
            waiting.extend(rng.permutation(len(examples)).tolist())
        some = [examples[waiting.pop(0)] for _ in range(training.batch)]
        return model.answer_loss(batched(some, pad, device), answers_of(some, device))

    return updated(model, loss, training)


def updated(model: Roberta, loss: Callable[[], torch.Tensor], training: Training) -> Iterator[float]:
    """Update a model with Adam; yield each loss. Raises InputError if one becomes NaN or infinite."""
    optimizer = torch.optim.Adam(model.parameters(), lr=training.learning_rate, betas=(0.9, 0.98), eps=1e-6)
    warmup = max(1, round(WARMUP * training.updates))
    for update in range(1, training.updates + 1):
        share = min(update / warmup, (training.updates - update + 1) / (training.updates - warmup + 1))
        optimizer.param_groups[0]["lr"] = training.learning_rate * share
        model.train()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        check_finite(update, {"loss": value.item(), "gradient norm": float(norm)}, lambda: "this model was not kept")
        optimizer.step()
        yield value.item()
