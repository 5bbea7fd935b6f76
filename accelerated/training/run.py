"""A training run: what the loop in train.py keeps from one iteration to the next, and saves.

opening.py opens one.
"""

import contextlib
import math
import shlex
from collections.abc import Callable, Sequence
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
from accelerated.program.errors import InputError, counted
from accelerated.program.progress import Progress
from accelerated.protocol import Model, State, computing_in, state_from
from accelerated.replay import Result
from accelerated.training import process
from accelerated.training.checkpoint import FOREIGN, load_moments, load_weights, save_checkpoint
from accelerated.training.folder import Log
from accelerated.training.optimization import check_finite
from accelerated.training.settings import Settings, settings_contents

# Options that change what a validation measures: a best is comparable only if they agree
VALIDATION_FIELDS = ("validation_tokens", "validation_prefix", "clear_memory")


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
    model: Model
    backprop: Callable[..., Result]  # how gradients are computed, as a function of replay.py
    optimizer: torch.optim.Optimizer
    state: State  # of this process's lanes
    log: Log

    step: int = 0  # iterations done
    since_update: int = 0  # iterations since the last update
    gradient_norm: float = math.nan  # of the last update; NaN before the first
    nats: float = 0.0  # -log p of the tokens scored since the last line of the log
    scored: int = 0  # tokens, since then
    text_bytes: int = 0  # that these tokens spell
    tokens: int = 0  # read since the run was opened, padding and overlaps included

    save_due: bool = False  # after the next update
    validation_due: bool = False  # after the next update, or after the checkpoint that is resumed
    score: Any = None  # of the last validation: a Score of evaluation/score.py
    best: float = math.inf  # lowest validation loss in bits per byte
    is_best: bool = False  # whether the last validation is the best so far, and not yet saved

    def computing(self) -> contextlib.AbstractContextManager:
        """Inside, the model computes in the type of --dtype."""
        return computing_in(self.model, getattr(torch, self.settings.training.dtype))

    @property
    def lanes_at_once(self) -> int:
        """How many lanes this process computes at a time."""
        training = self.settings.training
        return process.lane_count(training.batch) // training.accumulate

    @property
    def ended(self) -> bool:
        """Whether the last step is done."""
        return self.step >= self.settings.training.steps

    def tokens_per_second(self, bar: Progress) -> float:
        """Tokens that all processes read per second of the bar; 0 if it is not shown."""
        seconds = bar.format_dict["elapsed"]
        return self.tokens / seconds if seconds else 0.0

    # What is due

    def mark_what_is_due(self) -> None:
        """Note whether this step asks for a validation and a checkpoint.

        Both wait for the next update.
        """
        training = self.settings.training
        every = training.validate_every
        if every < 0:
            every = math.ceil(training.steps / 10)
        if every and (self.ended or self.step % every == 0):
            self.validation_due = True
        saves = self.ended or self.step % training.save_every == 0
        self.save_due = self.save_due or self.validation_due or saves

    def log_due(self) -> bool:
        """Whether a line of the log is due after this step.

        There is one in --log-every steps, one at the end, and one before each validation.
        """
        validates = self.validation_due and not self.since_update
        return validates or self.ended or self.step % self.settings.training.log_every == 0

    # The log

    def log_means(self, learning_rate: float, speed: float, auxiliary: dict[str, float]) -> None:
        """Write the means since the last line of the log, and what else this step has measured.

        speed is in tokens per second.
        """
        record = {
            "step": self.step,
            "loss": self.nats / max(1, self.scored),
            "bits_per_byte": self.nats / math.log(2) / max(1, self.text_bytes),
            "learning_rate": learning_rate,
        }
        if not math.isnan(self.gradient_norm):
            record["gradient_norm"] = self.gradient_norm
        self.log.write(**record, tokens_per_second=speed, **auxiliary)
        self.nats = 0.0
        self.scored = 0
        self.text_bytes = 0

    def log_validation(self, carried: Any, cleared: Any = None, final: bool = False) -> None:
        """Write a validation, and the one with the memory cleared if that was measured."""
        record = {
            "step": self.step,
            "validation_bits_per_byte": carried.bits_per_byte,
            "validation_loss": carried.nats / carried.tokens,
            "validation_accuracy": carried.accuracy,
            "validation_tokens": carried.tokens,
        }
        if cleared:
            record["cleared_bits_per_byte"] = cleared.bits_per_byte
            record["cleared_accuracy"] = cleared.accuracy
        if final:
            record["final"] = True
        self.log.write(**record)

    # What is said

    def note_score(self, score: Any) -> str:
        """Note the Score of this step's validation, and log it. Returns a line about it."""
        before = self.best
        self.score = score
        self.is_best = score.bits_per_byte < before
        self.best = min(before, score.bits_per_byte)
        self.log_validation(score)
        measured = f"{score.bits_per_byte:.3f} bits per byte on {score.tokens:,} tokens"
        best = "the best so far" if self.is_best else f"the best was {self.best:.3f}"
        return f"step {self.step:,}: validation {measured}; {best}"

    def command(self, words: str) -> str:
        """A later command for this run, quoted for a shell: `words` before its folder."""
        given = [str(self.folder)]
        if self.data_dir != default_data_dir():
            given += ["--data-dir", str(self.data_dir)]
        return f"python {words} {shlex.join(given)}"

    @property
    def validation_share(self) -> float:
        """How much of the validation split is read."""
        whole = lengths_of(self.corpus.splits["valid"]).sum()
        return lengths_of(self.validation).sum() / whole

    def last_lines(self, carried: Any, cleared: Any) -> str:
        """What is printed of the last Score, and of the one with the memory cleared.

        That is None if no memory is carried.
        """
        what = f"validation on {counted(carried.tokens, 'token')}"
        if self.validation_share < 1:
            what += f" ({100 * self.validation_share:.3g}% of the split)"
        bits = f"{carried.bits_per_byte:.3f}"
        right = f"{carried.accuracy:.1%}"
        if cleared:
            bits += f" with the memory, {cleared.bits_per_byte:.3f} cleared each segment"
            right += f" with the memory, {cleared.accuracy:.1%} with it cleared"
        else:
            bits += "; no memory is carried"
        lines = [f"{what}, bits per byte: {bits}"]
        if self.settings.data.data == "recall":
            chance = self.settings.recall.chance
            lines.append(f"right answers: {right} (a guess {chance:.0%})")
        if cleared:
            saved = 1 - carried.bits_per_byte / cleared.bits_per_byte
            lines.append(f"the memory saves {saved:.1%} of the bits")
        return "\n".join(lines)

    # Saved and restored

    def load_best(self) -> str:
        """Load the weights of the lowest validation loss, and return a line about them."""
        best = load_weights(self.folder, None)
        self.model.load_state_dict(best["parameters"])
        if math.isinf(best["best"]):
            return "no validation has chosen a best step; these are the last weights"
        return f"the best was step {best['step']:,}, with {best['best']:.3f} bits per byte"

    def save(self) -> None:
        """Write all that resuming needs.

        Raises InputError, and the last checkpoint stays, if a parameter is NaN or infinite.
        """
        norm = torch.nn.utils.get_total_norm(self.model.parameters())
        check_finite(self.step, {"parameters": norm.item()})
        contents = settings_contents(self.settings) | {
            "parameters": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": tuple(process.gather_lanes(self.state)),
            "lanes": self.reader.state_dict(),
            "random": torch.get_rng_state(),
            "step": self.step,
            "corpus": self.corpus.digest,
            "tokenizer": self.tokenizer.fingerprint,
            "best": self.best,
            "gradient_norm": self.gradient_norm,
            "pending": (self.nats, self.scored, self.text_bytes, self.validation_due),
        }
        if process.rank() == 0:
            if self.is_best:  # first: a kill may come
                save_checkpoint(self.folder / "best.pt", contents)
            save_checkpoint(self.folder / "checkpoint.pt", contents)
        self.save_due = False
        self.is_best = False

    def restore(self, contents: dict, path: str | Path) -> None:
        """Restore everything but the parameters from the checkpoint at path.

        Raises InputError unless its contents fit this run.
        """
        training = self.settings.training
        try:
            torch.set_rng_state(contents["random"].cpu())
            self.reader.load_state_dict(contents["lanes"])
            load_moments(self.optimizer, contents["optimizer"])
            self.nats, self.scored, self.text_bytes, self.validation_due = contents["pending"]
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"{path} holds what does not fit this run ({error}); {FOREIGN}"
            ) from None
        own_lanes = process.own_lanes(training.batch)
        self.state = state_from(self.state, [x[own_lanes].clone() for x in contents["state"]])
        self.step = contents["step"]
        self.gradient_norm = contents["gradient_norm"]
        before = contents["training"]
        if all(before.get(name) == getattr(training, name) for name in VALIDATION_FIELDS):
            self.best = contents["best"]  # of the same measurement
