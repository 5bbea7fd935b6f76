"""Memformer's training tasks (section 2.3), drawn for every rollout and lane: continue the text, fill in masked spans, recall.

Options `--task-infilling` and `--task-recall`, with any --data; train.py deals the rollouts of every run with MultiTask.
(`--data recall`, a synthetic corpus for any model, has nothing to do with them: see recall.py.)

In segment i of a document the encoder reads segment i - 1. Continuation predicts segment i; infilling segment i - 1, which is
read with masked spans; recall segment i - 2. If the document has no such segment yet, the lane continues the text.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from accelerated.data.lanes import Lanes, Segment

TASKS = ("continuation", "infilling", "recall")


@dataclass(frozen=True)
class TaskConfig:
    """Which tasks a model is trained on; impossible values raise ValueError naming the field.

    Fields:
        infilling: share of lanes, drawn for every rollout, that fill in masked spans
        recall: share of lanes that recall the segment before the one being read, whatever --data is; the rest continues the text
        masked: fraction of a segment's tokens that infilling masks
        span: mean length of a masked span in tokens, Poisson distributed
    """

    infilling: float = 0.0
    recall: float = 0.0
    masked: float = 0.3
    span: float = 3.5

    def __post_init__(self):
        for name in ("infilling", "recall"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in 0..1")
        if self.infilling + self.recall > 1:
            raise ValueError(f"infilling {self.infilling} and recall {self.recall} are more than 1 together; make one smaller")
        if not 0 < self.masked < 1:
            raise ValueError(
                f"masked is {self.masked}; it must be above 0, which masks nothing, and below 1, which masks everything"
            )
        if not 0.1 <= self.span < math.inf:
            raise ValueError(f"span is {self.span}; it must be at least 0.1, or hardly a span would mask anything")

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of lanes, in the order of TASKS."""
        return (max(0.0, 1 - self.infilling - self.recall), self.infilling, self.recall)

    @property
    def continuation_alone(self) -> bool:
        """Whether all lanes always continue the text."""
        return self.infilling == self.recall == 0

    def budget(self, length: int) -> int:
        """Tokens that are masked in a text of that length."""
        return round(self.masked * length)


class Task(NamedTuple):
    """The task of every lane in one segment; axis 0 of every field is the lane."""

    kind: torch.Tensor  # (B,) index into TASKS
    reading: torch.Tensor  # (B, N) token ids that the encoder reads
    readable: torch.Tensor  # (B, N) bool, false on the padding after a text with masked spans
    prompt: torch.Tensor  # (B, N) token ids that the decoder reads after the task's token

    def to(self, device: torch.device) -> "Task":
        return Task(*(field.to(device) for field in self))


def span_lengths(budget: int, mean: float, rng: np.random.Generator) -> list[int]:
    """Lengths of spans that mask `budget` tokens together: drawn from a Poisson distribution, the last cut to fit.

    An empty span adds a mask token; it is drawn again unless longer spans have made room for it, so that a text never grows.
    """
    lengths, spent = [], 0
    while spent < budget:
        length = min(int(rng.poisson(mean)), budget - spent)
        if length or len(lengths) < spent:
            lengths.append(length)
            spent += length
    return lengths


def mask_spans(text: np.ndarray, mask: int, config: TaskConfig, rng: np.random.Generator) -> np.ndarray:
    """text (n,) with spans of tokens replaced by one `mask` each, placed uniformly over all ways to place them."""
    lengths = span_lengths(config.budget(len(text)), config.span, rng)
    items = len(text) - config.budget(len(text)) + len(lengths)
    masked, width = np.zeros(items, bool), np.ones(items, int)  # width: tokens of the text that each item stands for
    places = rng.permutation(items)[: len(lengths)]
    masked[places], width[places] = True, lengths
    first = np.minimum(np.cumsum(width) - width, len(text) - 1)
    return np.where(masked, mask, text[first])


class MultiTask:
    """Deals rollouts of a Lanes with the tasks of a TaskConfig; the lanes' own segments if all of them continue the text.

    special(name) is the id of a special token. Draws depend on the seed and the number of rollouts so far, so a position() is
    enough to resume.
    """

    def __init__(self, lanes: Lanes, config: TaskConfig, special: Callable | None = None, seed: int = 0):
        self.lanes, self.config, self.special, self.seed = lanes, config, special, seed
        self.rollouts = 0
        shape = (len(lanes.reading), lanes.length)
        self.previous, self.earlier = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.age = np.zeros(shape[0], np.int64)  # segments of its document that each lane has read

    def rollout(self, horizon: int) -> list[Segment]:
        """The next `horizon` segments of every lane."""
        segments = [next(self.lanes) for _ in range(horizon)]
        if not self.config.continuation_alone:
            rng = np.random.default_rng([self.seed, self.rollouts])
            drawn = rng.choice(len(TASKS), size=len(self.age), p=self.config.shares)
            segments = [self._with_task(segment, drawn, rng) for segment in segments]
        self.rollouts += 1
        return segments

    def _with_task(self, segment, drawn, rng):
        """The segment with the tasks that were drawn for its lanes, as far as their documents have segments for them."""
        starts, tokens = segment.starts.numpy(), segment.tokens.numpy()
        self.age[starts], self.previous[starts] = 0, self.special("begin")
        kind = np.where(self.age >= drawn, drawn, 0)  # infilling needs one segment before, recall two
        prompt = np.choose(kind[:, None], [tokens, self.previous, self.earlier])
        reading, readable = self.previous.copy(), np.ones(tokens.shape, bool)
        for lane in np.flatnonzero(kind == TASKS.index("infilling")):
            masked = mask_spans(self.previous[lane], self.special("mask"), self.config, rng)
            reading[lane, : len(masked)], readable[lane] = masked, np.arange(tokens.shape[1]) < len(masked)
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
        return position | {"history": {name: getattr(self, name).tolist() for name in ("previous", "earlier", "age")}}

    def seek(self, position: dict) -> None:
        """Continue from the position() of other lanes over the same documents."""
        self.lanes.seek(position)
        self.rollouts = position.get("rollouts", 0)  # not in checkpoints older than the tasks
        for name, rows in position.get("history", {}).items():
            setattr(self, name, np.array(rows, np.int64))
