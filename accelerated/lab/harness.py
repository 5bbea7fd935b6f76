"""eval.py harness: the tasks of the package lm_eval, asked of a trained model.

From Python `lm_eval.simple_evaluate(model=HarnessModel(model, tokenizer), tasks=[...])` does it,
with the model and the tokenizer of `accelerated.load`.
"""

import argparse
from typing import Any

import numpy as np
import torch

from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document
from accelerated.evaluation.sample import stream_text
from accelerated.evaluation.score import Answer, TrainedRun, carried_through
from accelerated.generation.continuation import Sampling, continue_text
from accelerated.program.errors import InputError, optional_package
from accelerated.protocol import Model

NEEDS = ("its tasks need", "harness")
TemplateLM: Any = optional_package("lm_eval.api.model", *NEEDS).TemplateLM
utils = optional_package("lm_eval.utils", *NEEDS)
generation = optional_package("lm_eval.models.utils", *NEEDS)
ENDS = (b"<|endoftext|>", b"</s>")  # of a text, as tokenizers spell it


class HarnessModel(TemplateLM):
    """What lm_eval asks of a model: log-probabilities of texts, and continuations.

    A request is a document: the state is carried through its segments. With `clear_memory` all is
    as in lm_eval's own model of the package transformers (HFLM): it is cut into windows of at most
    a segment, each of which begins with the initial state, and of a longer context the end is kept.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, lanes: int = 8, clear_memory: bool = False
    ):
        super().__init__()
        self.model = model
        self.text_tokenizer = tokenizer
        self.lanes = lanes
        self.clear_memory = clear_memory
        self.segment = model.config.segment

    @property
    def eot_token_id(self) -> int:
        """What a text's first token is predicted from: the end of a text, or else of a line.

        It is 0 for a tokenizer that has neither.
        """
        spellings = self.text_tokenizer.spellings
        for end in ENDS:
            if end in spellings:
                return spellings.index(end)
        return next(iter(self.tok_encode("\n")), 0)

    def tok_encode(self, string: str, **others: Any) -> list[int]:
        """The ids of a text, none of them special."""
        return self.text_tokenizer.encode(string).tolist()

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text."""
        owners = []
        pairs = []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(*request.args)
            longest = self.segment if self.clear_memory else max(1, len(tokens))
            windows = utils.get_rolling_token_windows(tokens, self.eot_token_id, longest, 1)
            for window in windows:
                owners.append(owner)
                pairs.append(("", *utils.make_disjoint_window(window)))
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            totals[owner] += total
        return totals

    def _loglikelihood_tokens(self, requests: list, **others: Any) -> list[tuple[float, bool]]:
        """(Log-probability, whether each token is the likeliest) of each continuation.

        A request is (its text, tokens of the context, tokens of the continuation).
        """
        documents = [self.document(*tokens) for _, *tokens in requests]
        nats = np.zeros(len(documents))
        missed = np.zeros(len(documents))
        reading = carried_through(self.model, documents, self.lanes) if documents else ()
        for segment, _, _, predictions in reading:
            assert segment.place is not None
            numbers = segment.place[:, 0]
            np.add.at(nats, numbers, predictions.nats.sum(1))
            np.add.at(missed, numbers, (segment.scored.numpy() & ~predictions.right).sum(1))
        return [(-float(total), not wrong) for total, wrong in zip(nats, missed, strict=True)]

    def document(self, context: list[int], continuation: list[int]) -> Document:
        """The tokens as a Document of which the continuation alone is scored."""
        tokens = np.array(context + continuation)
        if self.clear_memory:
            tokens = tokens[-(self.segment + 1) :]
        scored = np.arange(len(tokens) - 1) >= len(tokens) - 1 - len(continuation)
        return Document("", tokens[:-1], tokens[1:], scored)

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to the first of the words that end it."""
        return [self.continuation(*request.args) for request in requests]

    def continuation(self, context: str, options: dict) -> str:
        """The continuation of a context; lm_eval's options say how long it is, and how it ends."""
        settled = generation.normalize_gen_kwargs(options)
        count = settled["max_gen_toks"]
        ids = self.tok_encode(context) or [self.eot_token_id]
        if self.clear_memory:
            ids = ids[-max(1, self.segment - count) :]
        device = self.model.embedding.device
        sampling = Sampling(settled.get("temperature", 0.0))
        generator = torch.Generator(device).manual_seed(0)
        given = torch.tensor([ids], device=device)
        drawn = continue_text(self.model, given, count, sampling, generator)
        words = [*filter(None, settled["until"]), *map(bytes.decode, ENDS)]
        text = ""
        for piece in stream_text(self.text_tokenizer, drawn):
            text += piece
            ends = [text.index(word) for word in words if word in text]
            if ends:
                return text[: min(ends)]
        return text


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """lm_eval's own table of the tasks."""
    own = options.task_files
    task_manager = optional_package("lm_eval.tasks", *NEEDS).TaskManager
    manager = task_manager(include_path=own, include_defaults=own is None)
    names = options.tasks.split(",")
    unknown = sorted({*names} - {*manager.all_tasks})
    if unknown:
        where = own or "lm_eval"
        raise InputError(f"--tasks {unknown[0]}: {where} has no such task; give another")
    model = HarnessModel(run.model, run.tokenizer, run.lane_count, options.clear_memory)
    try:
        results = optional_package("lm_eval", *NEEDS).simple_evaluate(
            model=model, tasks=names, task_manager=manager, limit=options.limit, bootstrap_iters=0
        )
    except OSError as error:  # of the package datasets
        raise InputError(
            f"--tasks {options.tasks}: its documents cannot be read ({error}); "
            "fetch them on a machine with a network"
        ) from None
    return {"results": results["results"]}, utils.make_table(results).splitlines()
