"""Judges an ordering "better < worse" of a record, for the page and its picture.

An ordering is judged by the differences of the same seeds.
"""

import contextlib
import math
from collections.abc import Sequence

import numpy as np

from accelerated.lab.harness import mean_and_interval, paired


def seeds_of(row: dict) -> list[int]:
    """The seeds of a record's row; old records have them in order, from 0."""
    first = next(iter(row["measured"].values()))
    return row.get("seeds") or list(range(len(first)))


def by_seed(row: dict, title: str) -> dict:
    """{seed: what a measure of a record's row was}; None if a run diverged."""
    return dict(zip(seeds_of(row), row["measured"][title], strict=False))


def values_of(record: dict, side: str) -> dict:
    """{seed: what a side of an ordering was}; None if a run diverged.

    Raises KeyError if the record has no such row or measure.
    """
    rows = {row["name"]: row for row in record["rows"]}
    first_row = record["rows"][0]
    first_measure = next(iter(first_row["measured"]))
    names, _, title = side.partition(" @ ")
    better, _, subtracted = names.partition(" - ")
    if better not in rows:  # a measure alone
        return by_seed(first_row, side)
    values = by_seed(rows[better], title or first_measure)
    if not subtracted:
        return values
    others = by_seed(rows[subtracted], title or first_measure)
    found = {}
    for seed in values.keys() & others.keys():
        pair = (values[seed], others[seed])
        found[seed] = None if None in pair else pair[0] - pair[1]
    return dict(sorted(found.items()))


def differences(record: dict, ordering: str) -> list[float]:
    """worse - better of an ordering "better < worse" for each seed that both have."""
    return paired(*(values_of(record, side) for side in ordering.split(" < ")))


def orderings_in(record: dict, orderings: Sequence[str]) -> list[str]:
    """Those orderings of which a record has both sides in one seed at least."""
    there = []
    for ordering in orderings:
        with contextlib.suppress(KeyError):
            if differences(record, ordering):
                there.append(ordering)
    return there


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
    better, worse = (documents_of(record, name) for name in ordering.split(" < "))
    both = better.keys() & worse.keys()
    of_seeds = [worse[seed][0] - better[seed][0] for seed in sorted(both)]
    ahead = np.mean(of_seeds, 0) / math.log(2)  # bits, (documents,)
    text_bytes = next(iter(better.values()))[1]
    count = len(ahead)
    drawn = np.random.default_rng(0).integers(count, size=(draws, count))
    per_byte = ahead[drawn].sum(1) / text_bytes[drawn].sum(1)
    low, high = np.percentile(per_byte, [2.5, 97.5]).tolist()
    return low, high


def documents_of(record: dict, name: str) -> dict[int, np.ndarray]:
    """{seed: (nats, bytes) of each test document, (2, documents)} of a row."""
    [row] = [row for row in record["rows"] if row["name"] == name]
    found = {}
    for seed, documents in by_seed(row, "documents").items():
        found[seed] = np.array([[each["nats"], each["text_bytes"]] for each in documents]).T
    return found


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
