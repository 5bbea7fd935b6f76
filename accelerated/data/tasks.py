"""Memformer's training tasks (section 2.3): continue the text, fill in masked spans, or recall an earlier segment.

Each lane (one of B documents read side by side) draws a task for each rollout (the segments of one iteration). train.py uses
MultiTask in every run; `--task-infilling`, `--task-recall` work with any --data. (`--data recall` is unrelated: see recall.py.)

In segment i of a document the encoder reads segment i - 1. Continuation predicts segment i; infilling predicts segment i - 1,
which the encoder reads with masked spans; recall predicts segment i - 2. Without such a segment the lane continues the text.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from accelerated.data.config import TASKS, TaskConfig
from accelerated.data.lanes import Lanes, Segment, move

MASKED, SPAN = (
    0.3,
    3.5,
)  # the fraction of tokens that infilling masks, ours; the mean length of a span, of section 2.3


class Task(NamedTuple):
    """The task of every lane in one segment; axis 0 of every field is the lane."""

    kind: torch.Tensor  # (B,) index into TASKS
    reading: torch.Tensor  # (B, N) token ids that the encoder reads
    readable: torch.Tensor  # (B, N) bool, false on padding: masked spans shorten a text
    prompt: torch.Tensor  # (B, N) token ids that the decoder reads after the task's token

    def to(self, device: torch.device) -> "Task":
        return Task(*(move(field, device) for field in self))


def span_lengths(budget: int, mean: float, rng: np.random.Generator) -> list[int]:
    """Draw lengths of spans that mask `budget` tokens in total, from a Poisson distribution; the last is cut to fit.

    An empty span adds a mask token. It is kept only if longer spans have made room for it, so that a text never grows.
    """
    lengths, spent = [], 0
    while spent < budget:
        length = min(int(rng.poisson(mean)), budget - spent)
        if length or len(lengths) < spent:
            lengths.append(length)
            spent += length
    return lengths


def mask_spans(
    text: np.ndarray,
    mask: int,
    rng: np.random.Generator,
    masked: float = MASKED,
    span: float = SPAN,
) -> np.ndarray:
    """Return text (n,) with each drawn span replaced by one `mask` token; all placements of the spans are equally likely."""
    lengths = span_lengths(budget := round(masked * len(text)), span, rng)
    items = len(text) - budget + len(lengths)
    hidden, width = (
        np.zeros(items, bool),
        np.ones(items, int),
    )  # width: tokens of the text that each item stands for
    places = rng.permutation(items)[: len(lengths)]
    hidden[places], width[places] = True, lengths
    first = np.minimum(np.cumsum(width) - width, len(text) - 1)
    return np.where(hidden, mask, text[first])


class MultiTask:
    """Returns the rollouts of a Lanes with tasks as TaskConfig says; leaves segments unchanged if all lanes continue the text.

    special(name) is a special token's id. What is drawn depends only on the seed and the number of rollouts so far, so
    position() is enough to resume.
    """

    def __init__(
        self, lanes: Lanes, config: TaskConfig, special: Callable | None = None, seed: int = 0
    ):
        self.lanes, self.config, self.special, self.seed = lanes, config, special, seed
        self.rollouts = 0
        shape = (len(lanes.reading), lanes.length)
        self.previous, self.earlier = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.age = np.zeros(
            shape[0], np.int64
        )  # (B,) segments that each lane has read of its document

    def rollout(self, horizon: int) -> list[Segment]:
        """The next `horizon` segments of every lane."""
        segments = [next(self.lanes) for _ in range(horizon)]
        if not self.config.continuation_alone:
            rng = np.random.default_rng([self.seed, self.rollouts])
            drawn = rng.choice(len(TASKS), size=len(self.age), p=self.config.fractions)
            segments = [self._with_task(segment, drawn, rng) for segment in segments]
        self.rollouts += 1
        return segments

    def _with_task(self, segment, drawn, rng):
        """Return the segment with its lanes' tasks; a lane continues the text if its document is too young for its drawn task."""
        starts, tokens = segment.starts.numpy(), segment.tokens.numpy()
        self.age[starts], self.previous[starts] = 0, self.special("begin")
        kind = np.where(
            self.age >= drawn, drawn, 0
        )  # infilling needs one previous segment, recall two
        prompt = np.choose(kind[:, None], [tokens, self.previous, self.earlier])
        reading, readable = self.previous.copy(), np.ones(tokens.shape, bool)
        for lane in np.flatnonzero(kind == TASKS.index("infilling")):
            masked = mask_spans(self.previous[lane], self.special("mask"), rng)
            reading[lane, : len(masked)], readable[lane] = (
                masked,
                np.arange(tokens.shape[1]) < len(masked),
            )
        self.earlier, self.previous = self.previous, tokens.copy()
        self.age += 1
        other = torch.from_numpy(kind != 0)[:, None]
        task = Task(*(torch.from_numpy(array) for array in (kind, reading, readable, prompt)))
        targets = torch.where(other, task.prompt, segment.targets)
        return segment._replace(targets=targets, scored=segment.scored | other, task=task)

    def position(self) -> dict:
        """The place of every lane, for a checkpoint."""
        position = self.lanes.position() | {"rollouts": self.rollouts}
        if self.config.continuation_alone:
            return position
        return position | {
            "history": {
                name: getattr(self, name).tolist() for name in ("previous", "earlier", "age")
            }
        }

    def seek(self, position: dict) -> None:
        """Continue from a position() over the same documents."""
        self.lanes.seek(position)
        self.rollouts = position.get("rollouts", 0)  # old checkpoints lack it
        for name, rows in dict(position.get("history", {})).items():
            vars(self)[name][...] = rows
