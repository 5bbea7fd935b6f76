"""A training run: what the loop in train.py keeps from one iteration to the next, and how it is saved. opening.py opens it."""

import contextlib
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accelerated.data.config import default_data_dir
from accelerated.data.corpus import Corpus
from accelerated.data.lanes import Lanes
from accelerated.data.tasks import MultiTask
from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document, lengths_of
from accelerated.program.errors import counted
from accelerated.program.progress import Progress
from accelerated.protocol import computing_in
from accelerated.training import process
from accelerated.training.checkpoint import save_checkpoint
from accelerated.training.log import Log
from accelerated.training.optimization import TrainedModel, check_finite
from accelerated.training.settings import Settings, settings_contents


@dataclass
class Run:
    """Everything that a training run keeps from one iteration to the next."""

    settings: Settings
    folder: Path  # for checkpoints and the log
    data_dir: Path
    device: torch.device
    tokenizer: Tokenizer
    corpus: Corpus
    validation: Sequence[Document]  # joined if memory is carried over documents
    reader: Lanes | MultiTask  # gives the segments of all lanes, with their tasks if there are some
    model: torch.nn.Module
    trained: TrainedModel  # the model as training steps compute it
    optimizer: torch.optim.Optimizer
    state: tuple  # of this process's lanes
    log: Log
    step: int = 0  # iterations done
    best: float = math.inf  # lowest validation loss in bits per byte
    gathered: int = 0  # iterations since the last update
    gradient_norm: float = 0.0  # of the last update
    tokens: int = 0  # read since the run was opened, padding and overlaps included
    save_due: bool = False  # after the next update
    validation_due: bool = False  # after this step
    score: Any = None  # the Score of the last validation
    is_best: bool = False  # whether that is the best so far, and not yet saved
    plain: torch.nn.Module | None = (
        None  # until training begins: the model of --init, to which this run adds recurrence
    )

    def computing(self, model: torch.nn.Module | None = None) -> contextlib.AbstractContextManager:
        """Inside, a model, the run's own if none is given, computes in the type of --dtype."""
        return computing_in(model or self.model, getattr(torch, self.settings.training.dtype))

    @property
    def lanes_at_once(self) -> int:
        """How many lanes this process computes at a time."""
        return (
            self.settings.training.batch
            // process.world_size()
            // self.settings.training.accumulate
        )

    @property
    def ended(self) -> bool:
        """Whether the last step is done."""
        return self.step >= self.settings.training.steps

    def tokens_per_second(self, steps: Progress) -> float:
        """Tokens that all processes read per second of the bar, which has no pauses in its time; 0 if it is not shown."""
        seconds = steps.format_dict["elapsed"]
        return self.tokens / seconds if seconds else 0.0

    def note_what_is_due(self) -> None:
        """Note whether this step asks for a validation and a checkpoint, which wait for the next update."""
        training = self.settings.training
        self.validation_due |= training.validate_every > 0 and (
            self.step % training.validate_every == 0 or self.ended
        )
        self.save_due |= self.validation_due or self.step % training.save_every == 0 or self.ended

    def log_due(self) -> bool:
        """Whether a line of the log is due after this step: one in --log-every, one at the end, one before each validation."""
        validates = self.validation_due and not self.gathered
        return validates or self.step % self.settings.training.log_every == 0 or self.ended

    def note_score(self, score: Any) -> str:
        """Note the Score of this step's validation. Returns a line about it."""
        self.score, bits, before = score, score.bits_per_byte, self.best
        self.is_best, self.best = bits < before, min(before, bits)
        self.log.validation(self.step, score)
        best = "the best so far" if self.is_best else f"the best was {self.best:.3f}"
        return f"step {self.step:,}: validation {bits:.3f} bits per byte on {score.tokens:,} tokens; {best}"

    def save(self) -> None:
        """Write all that resuming needs; raises InputError, and the last checkpoint stays, if a parameter is NaN or infinite."""
        largest = torch.stack(
            [p.detach().abs().max() for p in self.model.parameters() if p.numel()]
        )
        check_finite(self.step, {"parameters": largest.sum().item()})
        contents = settings_contents(self.settings) | {
            "parameters": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": tuple(process.all_lanes(self.state)),
            "lanes": self.reader.position(),
            "random": torch.get_rng_state(),
            "step": self.step,
            "corpus": self.corpus.digest,
            "tokenizer": self.tokenizer.fingerprint,
            "best": self.best,
            "pending": self.log.pending,
        }
        if process.rank() == 0:
            for name in (
                ("best.pt", "checkpoint.pt") if self.is_best else ("checkpoint.pt",)
            ):  # best first: a kill may come
                save_checkpoint(self.folder / name, contents)
        self.save_due = self.is_best = False

    def command(self, words: str) -> str:
        """A later command for this run, quoted for a shell: `words` before its folder."""
        of_data = [] if self.data_dir == default_data_dir() else ["--data-dir", str(self.data_dir)]
        return f"python {words} {shlex.join([str(self.folder), *of_data])}"

    @property
    def validation_share(self) -> float:
        """How much of the validation split is read."""
        return lengths_of(self.validation).sum() / lengths_of(self.corpus.splits["valid"]).sum()

    def last_lines(self, carried: Any, cleared: Any) -> str:
        """What is printed of the last Score, and of the one with the memory cleared, None if there is no memory."""
        share = (
            f" ({100 * self.validation_share:.3g}% of the split)"
            if self.validation_share < 1
            else ""
        )
        what, bits = (
            f"validation on {counted(carried.tokens, 'token')}{share}",
            f"{carried.bits_per_byte:.3f}",
        )
        if not cleared:
            return f"{what}: {bits} bits per byte; this model carries no memory"
        bits = f"{what}, bits per byte: {bits} with the memory, {cleared.bits_per_byte:.3f} cleared each segment"
        if self.settings.data.data != "recall":
            return bits
        right = f"{carried.accuracy:.1%} with the memory, {cleared.accuracy:.1%} with it cleared"
        return f"{bits}\nright answers: {right} (chance {1 / self.settings.recall.values:.0%})"
