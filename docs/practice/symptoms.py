"""What is wrong with an answer: it is compared with what is right, and the symptom is named.

judging.py uses it. All functions are pure. They are given the same answer's results on several
examples, of different sizes, and a symptom is named only if it explains every one of them.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

TOLERANCE = 1e-9  # relative error of what is right, in float64
ROUNDING = 1e-5  # and of what float32 makes of it


class Example(NamedTuple):
    """One call of an answer."""

    sizes: dict  # {letter: size}
    given: dict  # {argument: value}
    found: dict  # {result: array}
    right: dict  # {result: array}
    letters: dict  # {result: "B, N, 1 + D"}, its shape
    terms: dict  # {result: {term: array}}, the sum of which is right
    mistakes: list  # [(sentence, {result: array})], what well-known mistakes return


class Symptom(NamedTuple):
    """What is wrong with a result, in one word and in a sentence."""

    kind: str
    words: str


# ----------------------------------------------------------------------------
# equal or not
def error_of(found: np.ndarray, right: np.ndarray) -> float:
    """The largest difference, relative to the largest right number; infinite for another shape."""
    if found.shape != right.shape:
        return math.inf
    if right.size == 0:
        return 0.0
    same = np.equal(found, right) | (np.isnan(found) & np.isnan(right))  # infinities too
    if same.all():
        return 0.0
    finite = np.isfinite(right)
    if not np.isfinite(found[~same]).all() or not finite[~same].all():
        return math.inf
    scale = np.abs(right[finite]).max() if finite.any() else 0.0
    difference = np.abs(found[finite] - right[finite].astype(float)).max()
    return float(difference / (scale or 1.0))


def equal(found: np.ndarray, right: np.ndarray) -> bool:
    """Whether an array is right."""
    return error_of(found, right) <= TOLERANCE


def all_right(found: dict, right: dict) -> bool:
    """Whether every result is right."""
    return all(equal(found[name], array) for name, array in right.items())


def wrong_places(found: np.ndarray, right: np.ndarray) -> np.ndarray:
    """True where two arrays of one shape differ by more than rounding."""
    finite = np.isfinite(right)
    scale = np.abs(right[finite]).max() if finite.any() else 1.0
    with np.errstate(invalid="ignore"):
        near = np.abs(found - right.astype(float)) <= TOLERANCE * (scale or 1.0)
    return ~(near | np.equal(found, right))


def first_wrong(found: dict, right: dict) -> str:
    """The first result that is wrong, or ""."""
    for name, array in right.items():
        if not equal(found[name], array):
            return name
    return ""


# ----------------------------------------------------------------------------
# the diagnosis
def symptom_of(examples: list[Example]) -> tuple[str, Symptom]:
    """(the first wrong result, its symptom); at least one of the examples is wrong."""
    wrong = [one for one in examples if not all_right(one.found, one.right)]
    name = first_wrong(wrong[0].found, wrong[0].right)
    sentence = known_mistake([*wrong[0].right], wrong)
    if sentence:
        return name, Symptom("mistake", sentence)
    its = [one for one in wrong if not equal(one.found[name], one.right[name])]
    for judge in SYMPTOMS:
        symptom = judge(name, its)
        if symptom:
            return name, symptom
    sentence = known_mistake([name], its)  # other results may have mistakes of their own
    if sentence:
        return name, Symptom("mistake", sentence)
    return name, Symptom("numbers", "other numbers, and none of the mistakes that are known here")


def known_mistake(names: list[str], examples: list[Example]) -> str:
    """The mistake that returns the same as the answer, in these results of all examples; or ""."""
    for number, (sentence, _) in enumerate(examples[0].mistakes):
        as_found = []
        for one in examples:
            _, returned = one.mistakes[number]
            as_found.append(all(equal(one.found[name], returned[name]) for name in names))
        if all(as_found):
            return sentence
    return ""


def pairs(name: str, examples: list[Example]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(found, right) of a result in every example."""
    return [(one.found[name], one.right[name]) for one in examples]


def axes_of(name: str, examples: list[Example]) -> list[str]:
    """The letters of a result's axes."""
    letters = examples[0].letters[name]
    return letters.split(", ") if letters else []


def not_finite(name: str, examples: list[Example]) -> Symptom | None:
    """NaN or an infinity that should not be there, in any example."""
    for found, _ in pairs(name, examples):
        if np.isnan(found).any():
            return Symptom(
                "NaN",
                "NaN: an overflow in exp, 0/0, or infinity times 0. A softmax first subtracts "
                "each row's largest score, axis=-1 with keepdims=True",
            )
    return None


def other_shape(name: str, examples: list[Example]) -> Symptom | None:
    """Another shape, and how it comes from the right one."""
    both = pairs(name, examples)
    if all(found.shape == right.shape for found, right in both):
        return None
    axes = axes_of(name, examples)
    found, right = next(pair for pair in both if pair[0].shape != pair[1].shape)
    shapes = f"shape {found.shape}; expected ({', '.join(axes)}), here {right.shape}"

    order = transposition(both)
    if order:
        return Symptom("transposed", f"transposed, axes in the order {order}: {shapes}")
    if all(one.size == two.size and equal(one.reshape(two.shape), two) for one, two in both):
        return Symptom("shape", f"the right numbers in another shape: {shapes}")
    more = found.ndim - right.ndim
    for summed in itertools.combinations(range(found.ndim), max(0, more)):
        sums = [(one.sum(summed), two) for one, two in both if one.ndim == found.ndim]
        if more > 0 and len(sums) == len(both) and all(equal(*pair) for pair in sums):
            axis = ", ".join(map(str, summed))
            return Symptom("sum", f"not summed over axis {axis} of what you return: {shapes}")
    return Symptom("shape", f"another shape: {shapes}")


def transposition(both: list) -> tuple | None:
    """The order of the axes in which all arrays that were found are the right ones."""
    found, right = both[0]
    if found.ndim != right.ndim:
        return None
    for order in itertools.permutations(range(found.ndim)):
        turned = [(one, two.transpose(order)) for one, two in both if two.ndim == len(order)]
        if len(turned) == len(both) and all(equal(*pair) for pair in turned):
            return order
    return None


def reordered(name: str, examples: list[Example]) -> Symptom | None:
    """The right shape, and transposed inside it."""
    both = pairs(name, examples)
    for order in itertools.permutations(range(both[0][1].ndim)):
        turned = [two.transpose(order) for _, two in both]
        if all(
            equal(one, again.reshape(one.shape))
            for (one, _), again in zip(both, turned, strict=True)
        ):
            square = all(
                one.shape == again.shape for (one, _), again in zip(both, turned, strict=True)
            )
            how = "transposed" if square else "a reshape of a transposed array"
            return Symptom(
                "transposed", f"the right numbers in the wrong order, {how}, axes {order}"
            )
    return None


def rounded(name: str, examples: list[Example]) -> Symptom | None:
    """Right, but not in float64."""
    if any(error_of(*pair) > ROUNDING for pair in pairs(name, examples)):
        return None
    return Symptom(
        "float32",
        "right except in float32: it agrees to 5 digits or more, not to 9. Something was "
        "rounded to float32, or a small constant is missing",
    )


def swapped(name: str, examples: list[Example]) -> Symptom | None:
    """It is another result, or an argument."""
    for other in examples[0].right:
        if other != name and all(equal(one.found[name], one.right[other]) for one in examples):
            return Symptom("swapped", f"it is {other}: results are in another order")
    for argument, value in examples[0].given.items():
        is_array = isinstance(value, np.ndarray)
        if is_array and all(equal(one.found[name], one.given[argument]) for one in examples):
            return Symptom("swapped", f"it is the argument {argument}, unchanged")
    return None


def only_zeros(name: str, examples: list[Example]) -> Symptom | None:
    """Zero where it should not be, or not zero where it should be, and right elsewhere."""
    stopped = []
    flows = []
    for found, right in pairs(name, examples):
        wrong = wrong_places(found, right)
        stopped.append(not found[wrong].any())
        flows.append(not right[wrong].any())
    is_gradient = name.startswith("d")
    if all(stopped):
        what = "no gradient flows where it should" if is_gradient else "zero where it should not be"
        return Symptom("stopped", f"{what}; elsewhere it is right")
    if all(flows):
        what = "gradient flows where it must stop" if is_gradient else "not zero where it must be"
        return Symptom("flows", f"{what}; elsewhere it is right")
    return None


def other_keys(name: str, examples: list[Example]) -> Symptom | None:
    """A mask, or scores that are -inf where a key is hidden: keys too many or too few."""
    more = less = False
    for found, right in pairs(name, examples):
        if right.dtype != bool and not np.isneginf(right).any() and not np.isneginf(found).any():
            return None
        seen = visible(found)
        should = visible(right)
        more |= bool((seen & ~should).any())
        less |= bool((should & ~seen).any())
    if not more and not less:
        return None
    words = {(1, 0): "a key too many is seen", (0, 1): "a key too few is seen"}
    both = "keys are seen that must be hidden, and others are hidden"
    return Symptom("key", words.get((int(more), int(less)), both))


def visible(array: np.ndarray) -> np.ndarray:
    """Where a key is seen: a mask itself, or what is not -inf."""
    return array.astype(bool) if array.dtype == bool else ~np.isneginf(array)


def factor(name: str, examples: list[Example]) -> Symptom | None:
    """The same factor everywhere, and which."""
    ratios = []
    for found, right in pairs(name, examples):
        if not np.isfinite(found).all() or not np.isfinite(right).all():
            return None
        size = float((right.astype(float) ** 2).sum())
        ratio = float((found * right.astype(float)).sum()) / size if size else 0.0
        if not equal(found, ratio * right):
            return None
        ratios.append(ratio)
    known = named_factor(ratios, examples)
    if known == "-1":
        return Symptom("sign", "the sign is wrong everywhere")
    if not known and all(right.size == 1 for _, right in pairs(name, examples)):
        return None  # any two numbers have a factor
    by = known or "a constant, here " + ", ".join(f"{ratio:.4g}" for ratio in ratios[:3])
    return Symptom("factor", f"a factor: it is the right one times {by}")


def named_factor(ratios: list[float], examples: list[Example]) -> str:
    """The name that a factor has in all examples, such as sqrt(E), or ""."""
    if not ratios:
        return ""
    names = factors(examples[0].sizes)
    for label, _ in names:
        values = [dict(factors(one.sizes))[label] for one in examples]
        both = zip(ratios, values, strict=True)
        if all(abs(ratio - value) <= 1e-7 * abs(value) for ratio, value in both):
            return label
    return ""


def factors(sizes: dict) -> list[tuple[str, float]]:
    """[(name, value)] of the factors that mistakes bring in."""
    known = [("-1", -1.0), ("2", 2.0), ("1/2", 0.5), ("4", 4.0), ("1/4", 0.25)]
    for letter, size in sizes.items():
        root = math.sqrt(size) if size else 1.0
        known += [(letter, size), (f"1/{letter}", 1 / (size or 1))]
        known += [(f"sqrt({letter})", root), (f"1/sqrt({letter})", 1 / root)]
    for (one, first), (two, second) in itertools.combinations(sizes.items(), 2):
        product = first * second
        known += [(f"{one}*{two}", product), (f"1/({one}*{two})", 1 / (product or 1))]
    known += [(f"-{label}", -value) for label, value in known[1:]]
    return known


def terms(name: str, examples: list[Example]) -> Symptom | None:
    """A sum of the equation's terms, one of which is missing, doubled, or has another factor."""
    shares = []  # of each example, how often each term is in it
    explained = []
    for one in examples:
        parts = one.terms.get(name, {})
        matrix = columns_of(one.found[name], [*parts.values()])
        if matrix is None:
            continue  # too small to tell its terms apart
        share = how_often(one.found[name], matrix)
        if share is None:
            return None
        shares.append(share)
        explained.append(one)
    if not shares:
        return None
    labels = [*examples[0].terms[name]]
    wrong = []
    for label, times in zip(labels, zip(*shares, strict=True), strict=True):
        if not all(abs(share - 1) <= 1e-7 for share in times):
            wrong.append((label, [*times]))
    if len(wrong) != 1:
        return None
    label, times = wrong[0]
    if all(abs(share) <= 1e-7 for share in times):
        return Symptom("term", f"one term of the sum is missing: {label}")
    known = named_factor(times, explained)
    words = {"-1": "has the wrong sign", "2": "is counted twice"}
    what = words.get(known, f"has a factor too many, {known or times[0]}")
    return Symptom("term", f"one term of the sum {what}: {label}")


def columns_of(found: np.ndarray, parts: list[np.ndarray]) -> np.ndarray | None:
    """Terms as the columns of a matrix; None if there are none or they cannot be told apart."""
    if len(parts) < 2 or not np.isfinite(found).all():
        return None
    columns = [np.broadcast_to(part, found.shape).ravel() for part in parts]
    matrix = np.stack(columns, axis=1)  # (numbers, parts)
    return matrix if np.linalg.matrix_rank(matrix) == len(parts) else None


def how_often(found: np.ndarray, matrix: np.ndarray) -> np.ndarray | None:
    """How often each term is in an array; None if it is no sum of them."""
    share, *_ = np.linalg.lstsq(matrix, found.ravel(), rcond=None)
    return share if equal((matrix @ share).reshape(found.shape), found) else None


def shifted(name: str, examples: list[Example]) -> Symptom | None:
    """Right, but one place too far along an axis, or in reverse order."""
    both = pairs(name, examples)
    for axis, letter in enumerate(axes_of(name, examples)):
        several = [pair for pair in both if pair[1].shape[axis] > 1]
        turned = [(np.flip(one, axis), two) for one, two in several]
        if turned and all(equal(*pair) for pair in turned):
            return Symptom("shifted", f"in reverse order along {letter}")
        for places in (1, -1, 2, -2):
            longer = [pair for pair in both if pair[1].shape[axis] > abs(places)]
            moved = [overlap(one, two, axis, places) for one, two in longer]
            if moved and all(one.size and equal(one, two) for one, two in moved):
                where = "late" if places > 0 else "early"
                return Symptom("shifted", f"shifted by {abs(places)} along {letter}, too {where}")
    return None


def overlap(found: np.ndarray, right: np.ndarray, axis: int, places: int) -> tuple:
    """(found, right) where one lies over the other after a shift by some places."""
    length = found.shape[axis]
    late = np.arange(max(0, places), length + min(0, places))
    early = late - places
    return np.take(found, late, axis), np.take(right, early, axis)


def other_lanes(name: str, examples: list[Example]) -> Symptom | None:
    """A lane has what is another's, or only some lanes are right."""
    if axes_of(name, examples)[:1] != ["B"]:
        return None
    both = [pair for pair in pairs(name, examples) if len(pair[1]) > 1]
    if not both:
        return None
    for words, order in LANES.items():
        if all(equal(found, right[order(len(right))]) for found, right in both):
            return Symptom("lane", words)
    return None


LANES: dict[str, Callable] = {
    "every lane has the first lane's": lambda lanes: np.zeros(lanes, int),
    "every lane has the last lane's": lambda lanes: np.full(lanes, lanes - 1),
    "each lane has the next lane's": lambda lanes: np.roll(np.arange(lanes), -1),
    "each lane has the previous lane's": lambda lanes: np.roll(np.arange(lanes), 1),
}


def one_place(name: str, examples: list[Example]) -> Symptom | None:
    """Right everywhere except at the first or the last place of an axis."""
    for axis, letter in enumerate(axes_of(name, examples)):
        several = [pair for pair in pairs(name, examples) if pair[1].shape[axis] > 1]
        for where, words in ((0, "first"), (-1, "last")):
            if several and all(wrong_only_at(*pair, axis, where) for pair in several):
                return Symptom("place", f"right except at the {words} place along {letter}")
    return None


def wrong_only_at(found: np.ndarray, right: np.ndarray, axis: int, where: int) -> bool:
    """Whether an axis has more than one place, and all that is wrong lies at one of them."""
    wrong = wrong_places(found, right)
    others = np.delete(wrong, where, axis)
    return others.size > 0 and not others.any()


# In the order of asking; the first that explains all examples is said
SYMPTOMS = (
    not_finite,
    swapped,
    other_shape,
    other_keys,
    rounded,
    only_zeros,
    factor,
    terms,
    other_lanes,
    shifted,
    reordered,
    one_place,
)


# ----------------------------------------------------------------------------
# what is shown beside it
def where_wrong(found: np.ndarray, right: np.ndarray) -> str:
    """The place of the largest difference, with both numbers."""
    if found.shape != right.shape:
        return f"yours has shape {found.shape}, the right one {right.shape}"
    if right.size == 0:
        return "both are empty"
    wrong = wrong_places(found, right)
    with np.errstate(invalid="ignore"):
        apart = np.where(wrong, np.nan_to_num(np.abs(found - right.astype(float)), nan=np.inf), -1)
    at = np.unravel_index(int(apart.argmax()), right.shape)
    place = ", ".join(str(int(i)) for i in at)
    return f"at [{place}] yours is {found[at]:.6g}, the right one {right[at]:.6g}"


def drawing(found: np.ndarray, right: np.ndarray) -> Iterator[str]:
    """Two masks beside each other, a line a query: x is seen, . is hidden."""
    if found.shape != right.shape or right.ndim < 2:
        return
    wrong = (visible(found) != visible(right)).reshape(-1, *right.shape[-2:])
    lane = int(wrong.any((1, 2)).argmax())  # the first picture that differs
    yours, expected = (visible(array).reshape(wrong.shape)[lane] for array in (found, right))
    width = yours.shape[1] + 2
    yield f"{'yours':<{max(width, 7)}}right"
    for mine, theirs in zip(yours, expected, strict=True):
        rows = ["".join("x" if seen else "." for seen in row) for row in (mine, theirs)]
        yield f"{rows[0]:<{max(width, 7)}}{rows[1]}"
