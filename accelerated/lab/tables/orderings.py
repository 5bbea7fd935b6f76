"""Judges an ordering "better < worse" of a record, for the page and its picture.

An ordering is judged by the differences of the same seeds.
"""

import math

import numpy as np

from accelerated.lab.harness import mean_and_interval


def by_seed(row: dict, title: str) -> dict:
    """{seed: what a measure of a record's row was}."""
    return dict(zip(row["seeds"], row["measured"][title], strict=False))


def values_of(record: dict, side: str) -> dict:
    """{seed: what a side of an ordering was}."""
    rows = {row["name"]: row for row in record["rows"]}
    first_row = record["rows"][0]
    names, _, title = side.partition(" @ ")
    better, _, subtracted = names.partition(" - ")
    if better not in rows:  # a measure alone
        return by_seed(first_row, side)
    title = title or next(iter(first_row["measured"]))
    values = by_seed(rows[better], title)
    return minus(values, by_seed(rows[subtracted], title)) if subtracted else values


def minus(values: dict, others: dict) -> dict:
    """{seed: values - others} of each seed that both have.

    Runs of one seed read the same text in the same order.
    """
    return {seed: values[seed] - others[seed] for seed in values if seed in others}


def differences(record: dict, ordering: str) -> list[float]:
    """worse - better of an ordering "better < worse" for each seed that both have."""
    better, worse = (values_of(record, side) for side in ordering.split(" < "))
    return list(minus(worse, better).values())


def verdict(differences: list[float]) -> str:
    """What worse - better of each seed says of an ordering."""
    mean, half = mean_and_interval(differences)
    if abs(mean) <= half:
        return "cannot be told"
    return "holds" if mean > 0 else "does not hold"


def over_documents(record: dict, ordering: str) -> tuple[float, float]:
    """The 95% interval of worse - better in bits per byte if other test documents were drawn.

    A bootstrap: as many documents are drawn with replacement, in the same draw for both rows. A
    document's loss is the mean of the seeds that both rows have.
    """
    better, worse = (documents_of(record, name) for name in ordering.split(" < "))
    both = sorted(better.keys() & worse.keys())
    of_seeds = [worse[seed][0] - better[seed][0] for seed in both]
    ahead = np.mean(of_seeds, 0) / math.log(2)  # bits, (documents,)
    _, text_bytes = better[both[0]]
    drawn = np.random.default_rng(0).integers(len(ahead), size=(10_000, len(ahead)))
    per_byte = ahead[drawn].sum(1) / text_bytes[drawn].sum(1)
    low, high = np.percentile(per_byte, [2.5, 97.5]).tolist()
    return low, high


def documents_of(record: dict, name: str) -> dict[int, np.ndarray]:
    """{seed: (nats, bytes) of each test document, (2, documents)} of a row."""
    found = {}
    for seed, documents in values_of(record, f"{name} @ documents").items():
        found[seed] = np.array([[each["nats"], each["text_bytes"]] for each in documents]).T
    return found


def in_words(record: dict, ordering: str) -> str:
    """An ordering as a reader sees it, each side with its measure, if that is not the first."""
    first = next(iter(record["rows"][0]["measured"]))
    words = ordering.replace(f" @ {first}", "").replace(" @ ", ", ")
    return words.replace(" < ", " against ")
