"""eval.py topics: how near a continuation's topics are to those of its context.

That is section 5.3.1 of Adding Recurrence. Each context is one window. The model continues it
greedily in a new window, which knows it through the inserted vectors alone.
"""

import argparse
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from accelerated.data.lanes import Parts
from accelerated.data.tokenizers import Tokenizer
from accelerated.data.windows import Document, lengths_of
from accelerated.evaluation.score import Answer, TrainedRun
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
    return optional_package(f"sklearn.{module}", "topics needs", "topics")


def drawn_pieces(
    documents: Sequence[Document], count: int, length: int, rng: np.random.Generator
) -> np.ndarray:
    """Token ids (count, length) of pieces from anywhere in documents that are long enough.

    Each place is as likely.
    """
    tokens = lengths_of(documents) + 1
    places = np.maximum(tokens - length + 1, 0)  # where a piece can begin, of each document
    if not places.any():
        raise InputError(
            f"no document has {length:,} tokens; give longer ones, or a shorter --segment"
        )
    ends = np.cumsum(places)
    chosen = np.sort(rng.integers(ends[-1], size=count))
    owners = np.searchsorted(ends, chosen, side="right")
    starts = chosen - (ends - places)[owners]
    stops = starts + length - 1  # of predictions
    spans = zip(owners.tolist(), starts.tolist(), stops.tolist(), strict=True)
    return np.stack([ids_of(piece) for piece in Parts(documents, list(spans))])


def topic_model(texts: Sequence[bytes], seed: int = 0) -> Any:
    """A latent Dirichlet allocation over the words of texts.

    `transform` gives the distributions (n, TOPICS) of n texts.
    """
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
    """The Jensen-Shannon divergence in bits, 0 .. 1, of each row of distributions (n, TOPICS)."""
    return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2


def entropy(p: np.ndarray) -> np.ndarray:
    """The bits of each row (n, TOPICS), 0 log 0 being 0: (n,)."""
    return -(p * np.log2(np.where(p > 0, p, 1))).sum(-1)


def continuations(run: TrainedRun, contexts: np.ndarray, count: int) -> np.ndarray:
    """Greedy continuations (contexts, count) of contexts (contexts, T), each in a new window."""
    greedy = Sampling(temperature=0.0)
    prompts = torch.as_tensor(contexts.astype("int64"), device=run.model.embedding.device)
    batches = prompts.split(LANES)
    continued = []
    for some in Progress("continuing contexts", len(batches), "batch", over=batches):
        tokens = continue_text(run.model, some, count, greedy, None, new_window=True)
        continued.append(torch.stack(list(tokens), 1))
    return torch.cat(continued).cpu().numpy()


def report(run: TrainedRun, options: argparse.Namespace) -> Answer:
    """The mean divergence between the topics of contexts and of their continuations."""
    sklearn("decomposition")  # says now if it is missing
    rng = np.random.default_rng(options.seed)
    length = run.model.config.segment
    contexts = drawn_pieces(run.splits[run.split], options.contexts, length, rng)
    fitted = drawn_pieces(training_split(run, options), FITTED, PIECE * length, rng)
    model = topic_model(texts_of(fitted, run.tokenizer), options.seed)
    continued = continuations(run, contexts, options.tokens)
    topics = model.transform(texts_of(contexts, run.tokenizer))
    later = model.transform(texts_of(continued, run.tokenizer))
    divergences = jensen_shannon(topics, later)

    mean = float(divergences.mean())
    error = float(divergences.std(ddof=1) / len(divergences) ** 0.5)
    lines = [
        "Jensen-Shannon divergence of topics, context to continuation: "
        f"{mean:.4f} bits, standard error {error:.4f}",
        f"{options.contexts:,} contexts of {length} tokens, continued by {options.tokens}; "
        f"{TOPICS} topics",
    ]
    rounded = np.round(divergences, 3).tolist()
    return {"mean": mean, "standard_error": error, "divergences": rounded}, lines


def texts_of(pieces: np.ndarray, tokenizer: Tokenizer) -> list[bytes]:
    """The texts of pieces (n, tokens)."""
    return [tokenizer.decode(piece) for piece in pieces]
