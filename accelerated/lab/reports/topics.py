"""eval.py topics: how near a continuation's topics are to those of its context (Adding Recurrence, section 5.3.1).

A topic model (latent Dirichlet allocation) is fitted to the training split. Each context is one window; the model continues it
greedily in a new window, which knows it through the inserted vectors and its last token alone.
"""

import argparse
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from accelerated.data.corpus import load_corpus
from accelerated.data.windows import lengths_of
from accelerated.evaluation.generation import Sampling, continue_text
from accelerated.evaluation.score import TrainedRun
from accelerated.program.errors import InputError, optional_package
from accelerated.program.progress import Progress

TOPICS = 20
FITTED = 5000  # pieces of the training split; the paper takes as many books
PIECE = 20  # windows in one of them
LANES = 64  # contexts that are continued at a time
GREEDY = Sampling(temperature=0.0)


def sklearn(module: str) -> ModuleType:
    """A module of the package scikit-learn; raises InputError if it is not installed."""
    return optional_package(f"sklearn.{module}", "topics needs", "topics", "scikit-learn")


def drawn_pieces(documents: Sequence, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Token ids (count, length) of pieces from anywhere in documents that are long enough, each place as likely."""
    places = np.maximum(lengths_of(documents) + 1 - length + 1, 0)  # where a piece can begin, of each document
    if not places.any():
        raise InputError(f"no document has {length:,} tokens; give longer ones, or a shorter --segment")
    ends = np.cumsum(places)
    chosen = np.sort(rng.integers(ends[-1], size=count))
    owners = np.searchsorted(ends, chosen, side="right")
    starts = chosen - (ends - places)[owners]
    found = []
    for owner, start in zip(owners.tolist(), starts.tolist(), strict=True):
        document, last = documents[owner], start + length - 1  # token k is target k - 1, the first one an input
        found.append(np.concatenate([document.inputs[: start == 0], document.targets[max(0, start - 1) : last]]))
    return np.stack(found)


class TopicModel:
    """Latent Dirichlet allocation over the words of texts."""

    def __init__(self, texts: Sequence[str], seed: int = 0):
        self.words = sklearn("feature_extraction.text").CountVectorizer(min_df=5, max_df=0.5, max_features=5000)
        try:
            counts = self.words.fit_transform(texts)
        except ValueError:
            raise InputError(
                "the training split has too few words for a topic model; give a run that has learned more text"
            ) from None
        allocation = sklearn("decomposition").LatentDirichletAllocation
        self.topics = allocation(TOPICS, learning_method="online", random_state=seed).fit(counts)

    def distributions(self, texts: Sequence[str]) -> np.ndarray:
        """The distribution over topics (texts, TOPICS) of each text; that of a text without known words is the prior's."""
        return self.topics.transform(self.words.transform(texts))


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The Jensen-Shannon divergence in bits, 0 .. 1, of each row of distributions (n, TOPICS): (n,)."""
    middle = (p + q) / 2
    return (relative_entropy(p, middle) + relative_entropy(q, middle)) / 2


def relative_entropy(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The relative entropy in bits of each row of p to that of q, where q is 0 only if p is: (n,)."""
    return np.where(p > 0, p * np.log2(np.where(p > 0, p, 1) / np.where(p > 0, q, 1)), 0).sum(-1)


def continuations(run: TrainedRun, contexts: np.ndarray, count: int) -> np.ndarray:
    """Greedy continuations (contexts, count) of contexts (contexts, T), each in a new window."""
    device, found = next(run.model.parameters()).device, []
    with Progress("continuing contexts", len(contexts), "context") as bar:
        for first in range(0, len(contexts), LANES):
            prompts = torch.as_tensor(contexts[first : first + LANES].astype("int64"), device=device)
            tokens = continue_text(run.model, prompts, count, GREEDY, new_window=True)
            found.append(torch.stack(list(tokens), 1).cpu().numpy())
            bar.update(len(prompts))
    return np.concatenate(found)


def texts_of(run: TrainedRun, pieces: np.ndarray) -> list[str]:
    """The text of each row of token ids."""
    return [run.tokenizer.decode(piece).decode(errors="ignore") for piece in pieces]


def report(run: TrainedRun, options: argparse.Namespace) -> tuple[dict, list[str]]:
    """The mean divergence between the topics of contexts and of their continuations."""
    sklearn("decomposition")  # says now if it is missing
    rng, length = np.random.default_rng(options.seed), run.model.config.segment
    [documents] = run.splits.values()
    training = load_corpus(run.settings.data, run.tokenizer, run.settings.recall, options.data_dir).splits["train"]
    contexts = drawn_pieces(documents, options.contexts, length, rng)
    model = TopicModel(texts_of(run, drawn_pieces(training, FITTED, PIECE * length, rng)), options.seed)
    continued = texts_of(run, continuations(run, contexts, options.tokens))
    found = jensen_shannon(model.distributions(texts_of(run, contexts)), model.distributions(continued))
    mean, error = found.mean(), found.std(ddof=1) / len(found) ** 0.5
    lines = [f"Jensen-Shannon divergence of topics, context to continuation: {mean:.4f} bits, standard error {error:.4f}"]
    lines.append(f"{options.contexts:,} contexts of {length} tokens, continued by {options.tokens}; {TOPICS} topics")
    return {"mean": float(mean), "standard_error": float(error), "divergences": np.round(found, 3).tolist()}, lines
