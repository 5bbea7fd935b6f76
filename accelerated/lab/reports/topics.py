"""eval.py topics: how near a continuation's topics are to those of its context (Adding Recurrence, section 5.3.1).

Each context is one window. The model continues it greedily in a new window, which knows it through the inserted vectors alone.
"""

import argparse
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from accelerated.data.lanes import Parts
from accelerated.data.windows import Document, lengths_of
from accelerated.evaluation.score import TrainedRun
from accelerated.generation.continuation import Sampling, continue_text
from accelerated.lab.reports.frequency import ids_of, training_split
from accelerated.program.errors import InputError, optional_package
from accelerated.program.progress import Progress

TOPICS = 20
FITTED = 5000  # pieces of the training split; the paper takes as many books
PIECE = 20  # windows in one of them
LANES = 64  # contexts that are continued at a time


def sklearn(module: str) -> ModuleType:
    """A module of the package scikit-learn; raises InputError if it is not installed."""
    return optional_package(f"sklearn.{module}", "topics needs", "topics", "scikit-learn")


def drawn_pieces(
    documents: Sequence[Document], count: int, length: int, rng: np.random.Generator
) -> np.ndarray:
    """Token ids (count, length) of pieces from anywhere in documents that are long enough, each place as likely."""
    places = np.maximum(
        lengths_of(documents) + 1 - length + 1, 0
    )  # where a piece can begin, of each document
    if not places.any():
        raise InputError(
            f"no document has {length:,} tokens; give longer ones, or a shorter --segment"
        )
    ends = np.cumsum(places)
    chosen = np.sort(rng.integers(ends[-1], size=count))
    owners = np.searchsorted(ends, chosen, side="right")
    starts = chosen - (ends - places)[owners]
    spans = list(
        zip(owners.tolist(), starts.tolist(), (starts + length - 1).tolist(), strict=True)
    )  # of predictions
    return np.stack([ids_of(piece) for piece in Parts(documents, spans)])


def topic_model(texts: Sequence[bytes], seed: int = 0) -> Any:
    """A latent Dirichlet allocation over the words of texts; `transform` gives the distributions (n, TOPICS) of n texts."""
    words = sklearn("feature_extraction.text").CountVectorizer(
        decode_error="ignore", min_df=5, max_df=0.5, max_features=5000
    )
    topics = sklearn("decomposition").LatentDirichletAllocation(
        TOPICS, learning_method="online", random_state=seed
    )
    try:
        return sklearn("pipeline").make_pipeline(words, topics).fit(texts)
    except ValueError:
        raise InputError(
            "the training split has too few words for a topic model; give a run with more text"
        ) from None


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The Jensen-Shannon divergence in bits, 0 .. 1, of each row of distributions (n, TOPICS): (n,)."""
    middle = np.where(p + q > 0, (p + q) / 2, 1)
    return (
        sum(np.where(x > 0, x * np.log2(np.where(x > 0, x, 1) / middle), 0).sum(-1) for x in (p, q))
        / 2
    )


def continuations(run: TrainedRun, contexts: np.ndarray, count: int) -> np.ndarray:
    """Greedy continuations (contexts, count) of contexts (contexts, T), each in a new window."""
    device, continued = next(run.model.parameters()).device, []
    with Progress("continuing contexts", len(contexts), "context") as bar:
        for first in range(0, len(contexts), LANES):
            prompts = torch.as_tensor(
                contexts[first : first + LANES].astype("int64"), device=device
            )
            tokens = continue_text(
                run.model, prompts, count, Sampling(temperature=0.0), None, new_window=True
            )
            continued.append(torch.stack(list(tokens), 1).cpu().numpy())
            bar.update(len(prompts))
    return np.concatenate(continued)


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The mean divergence between the topics of contexts and of their continuations."""
    sklearn("decomposition")  # says now if it is missing
    rng, length = np.random.default_rng(options.seed), run.model.config.segment
    [documents] = run.splits.values()
    contexts = drawn_pieces(documents, options.contexts, length, rng)
    fitted = drawn_pieces(training_split(run, options), FITTED, PIECE * length, rng)
    model = topic_model([run.tokenizer.decode(piece) for piece in fitted], options.seed)
    pieces = (contexts, continuations(run, contexts, options.tokens))
    divergences = jensen_shannon(
        *(model.transform([run.tokenizer.decode(piece) for piece in each]) for each in pieces)
    )
    mean, error = divergences.mean(), divergences.std(ddof=1) / len(divergences) ** 0.5
    lines = [
        f"Jensen-Shannon divergence of topics, context to continuation: {mean:.4f} bits, standard error {error:.4f}"
    ]
    lines.append(
        f"{options.contexts:,} contexts of {length} tokens, continued by {options.tokens}; {TOPICS} topics"
    )
    return {
        "mean": float(mean),
        "standard_error": float(error),
        "divergences": np.round(divergences, 3).tolist(),
    }, lines
