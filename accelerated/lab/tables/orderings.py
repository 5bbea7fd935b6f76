"""Judges an ordering "better < worse" of a record, for the page and its picture.

Runs of one seed read the same text in the same order, so an ordering is judged by the differences
of the same seeds.
"""

import math
import statistics

import numpy as np

# {values - 1: standard errors within which the mean is, 95 times in 100}
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


def mean_of(values: list[float | None]) -> float:
    """The mean of the seeds that did not diverge, NaN if all did."""
    finite = [value for value in values if value is not None]
    return statistics.mean(finite) if finite else math.nan


def values_of(record: dict, side: str) -> list:
    """What a side of an ordering was for each seed of a record; None if a run diverged."""
    rows = {row["name"]: row["measured"] for row in record["rows"]}
    first_row = next(iter(rows))
    first_measure = next(iter(rows[first_row]))
    names, _, title = side.partition(" @ ")
    better, _, subtracted = names.partition(" - ")
    if better not in rows:  # a measure alone
        return rows[first_row][side]
    values = rows[better][title or first_measure]
    if not subtracted:
        return values
    others = rows[subtracted][title or first_measure]
    pairs = zip(values, others, strict=False)
    return [None if None in pair else pair[0] - pair[1] for pair in pairs]


def differences(record: dict, ordering: str) -> list[float]:
    """worse - better of an ordering "better < worse" for each seed that both have.

    A run that diverged is infinitely bad.
    """
    better, worse = (values_of(record, side) for side in ordering.split(" < "))
    better = [math.inf if value is None else value for value in better]
    worse = [math.inf if value is None else value for value in worse]
    return [b - a for a, b in zip(better, worse, strict=False)]


def mean_and_interval(differences: list[float]) -> tuple[float, float]:
    """The mean of differences, and half the width of its 95% interval.

    That is infinite of one value, and NaN if a run diverged.
    """
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return mean, math.inf
    if not all(map(math.isfinite, differences)):
        return mean, math.nan
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, STUDENT[len(differences) - 1] * error


def plus_minus(mean: float, half: float) -> str:
    """A mean difference with half its interval, as text."""
    return f"{mean:+.3f} ± {half:.3f}"


def verdict(differences: list[float]) -> str:
    """What worse - better of each seed says of an ordering."""
    mean, half = mean_and_interval(differences)
    if mean - half > 0 or min(differences) == math.inf:
        return "holds"
    if mean + half < 0 or max(differences) == -math.inf:
        return "does not hold"
    return "cannot be told"


def over_documents(record: dict, ordering: str, draws: int = 10_000) -> tuple[float, float]:
    """The 95% interval of worse - better in bits per byte if other test documents were drawn.

    A bootstrap: as many documents are drawn with replacement, in the same draw for both rows. A
    document's loss is the mean of the seeds that both rows have.
    """
    names = ordering.split(" < ")
    better, worse = (documents_of(record, name, "nats") for name in names)
    both = min(len(better), len(worse))
    ahead = (worse[:both] - better[:both]).mean(0) / math.log(2)  # bits, (documents,)
    text_bytes = documents_of(record, names[0], "text_bytes")[0]
    count = len(ahead)
    drawn = np.random.default_rng(0).integers(count, size=(draws, count))
    per_byte = ahead[drawn].sum(1) / text_bytes[drawn].sum(1)
    low, high = np.percentile(per_byte, [2.5, 97.5]).tolist()
    return low, high


def documents_of(record: dict, name: str, field: str) -> np.ndarray:
    """A field of each test document, for each seed of a row, (seeds, documents)."""
    [row] = [row for row in record["rows"] if row["name"] == name]
    by_seed = row["measured"]["documents"]
    return np.array([[document[field] for document in documents] for documents in by_seed])


def over_both(half: float, low: float, high: float) -> float:
    """Half the width of an interval over seeds and documents.

    They vary independently, so their squares add up.

    half: half of the interval over seeds
    low, high: the interval over documents
    """
    return math.hypot(half, (high - low) / 2)


def in_words(record: dict, ordering: str) -> str:
    """An ordering as a reader sees it, each side with its measure, if that is not the first."""
    first = next(iter(record["rows"][0]["measured"]))
    sides = ordering.replace(f" @ {first}", "").split(" < ")
    measures = {side.partition(" @ ")[2] for side in sides}
    if len(measures) == 1 and "" not in measures:
        names = [side.partition(" @ ")[0] for side in sides]
        return f"{' against '.join(names)}, both {measures.pop()}"
    return " against ".join(sides).replace(" @ ", ", ")
