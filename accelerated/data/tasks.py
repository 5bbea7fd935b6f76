"""Memformer's training tasks (section 2.3): continue the text, fill in spans, or recall a segment.

Each lane (one of B documents read side by side) draws a task for each rollout (the segments of one
iteration). train.py reads by MultiTask if `--task-infilling` or `--task-recall` is given, with any
--data. (`--data recall` is unrelated: see recall.py.)

In segment i of a document the encoder reads segment i - 1. Continuation predicts segment i;
infilling predicts segment i - 1, or its masked tokens alone, which the encoder reads with masked
spans; recall predicts segment i - 2. Without such a segment the lane continues the text.
"""

from collections.abc import Callable

import numpy as np
import torch

from accelerated.data.config import CONTINUATION, TASKS, TaskConfig
from accelerated.data.lanes import Lanes, Segment, Task

MASKED = 0.3  # the fraction of tokens that infilling masks; ours
SPAN = 3.5  # the mean length of a masked span; section 2.3
SEGMENTS_NEEDED = np.array([0, 1, 2])  # segments read before, by task
HISTORY = ("previous", "earlier", "age")  # of every lane, in a MultiTask


def span_lengths(budget: int, mean: float, rng: np.random.Generator) -> list[int]:
    """Draw lengths of spans that mask `budget` tokens in total, from a Poisson distribution.

    The last is cut to fit. An empty span adds a mask token. It is kept only if longer spans have
    made room for it, so that a text never grows.
    """
    lengths = []
    spent = 0
    while spent < budget:
        length = min(int(rng.poisson(mean)), budget - spent)
        has_room = len(lengths) < spent
        if length > 0 or has_room:
            lengths.append(length)
            spent += length
    return lengths


def mask_spans(
    text: np.ndarray,
    mask: int,
    rng: np.random.Generator,
    masked: float = MASKED,
    span: float = SPAN,
) -> tuple[np.ndarray, np.ndarray]:
    """Return text (n,) with each drawn span replaced by one `mask` token, and what was masked.

    The second, (n,) bool, is true at tokens that were replaced. All placements of the spans are
    equally likely.
    """
    budget = round(masked * len(text))
    lengths = span_lengths(budget, span, rng)
    items = len(text) - budget + len(lengths)
    places = rng.permutation(items)[: len(lengths)]

    is_span = np.zeros(items, bool)
    is_span[places] = True
    width = np.ones(items, int)  # tokens of the text that each item stands for
    width[places] = lengths
    first = np.minimum(np.cumsum(width) - width, len(text) - 1)
    masked_tokens = np.repeat(is_span, width)  # (n,)
    return np.where(is_span, mask, text[first]), masked_tokens


class MultiTask:
    """Returns the rollouts of a Lanes with tasks as TaskConfig says.

    special(name) is a special token's id. What is drawn depends only on the seed and the number of
    rollouts so far, so its state_dict is enough to resume.
    """

    def __init__(
        self, lanes: Lanes, config: TaskConfig, special: Callable[[str], int], seed: int = 0
    ):
        self.lanes = lanes
        self.config = config
        self.special = special
        self.seed = seed
        self.rollouts = 0
        shape = (len(lanes.reading), lanes.length)
        self.previous = np.zeros(shape, np.int64)  # (B, N) the segment before this one
        self.earlier = np.zeros(shape, np.int64)  # (B, N) the segment before that
        self.age = np.zeros(len(lanes.reading), np.int64)  # (B,) segments read of the document

    def rollout(self, horizon: int) -> list[Segment]:
        """The next `horizon` segments of every lane, with their tasks."""
        rng = np.random.default_rng([self.seed, self.rollouts])
        self.rollouts += 1
        drawn = rng.choice(len(TASKS), size=len(self.age), p=self.config.fractions)
        return [self._with_task(segment, drawn, rng) for segment in self.lanes.rollout(horizon)]

    def _with_task(self, segment, drawn, rng):
        """Return the segment with its lanes' tasks, as drawn (B,) for this rollout.

        A lane continues the text if its document is too young for its task.
        """
        starts = segment.starts.numpy()
        tokens = segment.tokens.numpy()
        self.age[starts] = 0
        self.previous[starts] = self.special("begin")
        kind = np.where(self.age >= SEGMENTS_NEEDED[drawn], drawn, CONTINUATION)

        prompt = np.choose(kind[:, None], [tokens, self.previous, self.earlier])
        reading = self.previous.copy()
        readable = np.ones(tokens.shape, bool)
        continues = kind == CONTINUATION
        asked = np.broadcast_to(~continues[:, None], tokens.shape).copy()  # by another task
        for lane in np.flatnonzero(kind == TASKS.index("infilling")):
            left, masked = mask_spans(self.previous[lane], self.special("mask"), rng)
            reading[lane, : len(left)] = left
            readable[lane, len(left) :] = False
            if self.config.masked_only:
                asked[lane] = masked
        task = Task(*(torch.from_numpy(array) for array in (kind, reading, readable, prompt)))

        self.earlier = self.previous
        self.previous = tokens.copy()
        self.age += 1
        is_other = torch.from_numpy(~continues)[:, None]
        targets = torch.where(is_other, task.prompt, segment.targets)
        scored = torch.where(is_other, torch.from_numpy(asked), segment.scored)
        return segment._replace(targets=targets, scored=scored, task=task)

    def state_dict(self) -> dict:
        """The place of every lane, for a checkpoint."""
        history = {name: getattr(self, name).tolist() for name in HISTORY}
        return self.lanes.state_dict() | {"rollouts": self.rollouts, "history": history}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a state_dict over the same documents."""
        self.lanes.load_state_dict(state)
        self.rollouts = state["rollouts"]
        for name in HISTORY:
            getattr(self, name)[...] = state["history"][name]
