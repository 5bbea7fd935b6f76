"""What is wrong with an answer: it is compared with what is right, and the symptom is named.

judging.py uses it. All functions are pure. They are given the same answer's results on several
examples, of different sizes, and a symptom is named only if it explains every one of them.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

TOLERANCE = 1e-9  # of what is right, relative to the largest right number
ROUNDING = 1e-5  # and of what float32 makes of it


class Example(NamedTuple):
    """One call of an answer."""

    sizes: dict  # {letter: size}
    given: dict  # {argument: value}
    found: dict  # {result: array}
    right: dict  # {result: array}
    letters: dict  # {result: "B, N, 1 + D"}, its shape
    mistakes: list  # [(sentence, {result: array})], what well-known mistakes return

    @property
    def wrong(self) -> list[str]:
        """The results that are wrong."""
        return [name for name, array in self.right.items() if not equal(self.found[name], array)]


# ----------------------------------------------------------------------------
# equal or not
def agreeing(found: np.ndarray, right: np.ndarray, tolerance: float = TOLERANCE) -> np.ndarray:
    """True where two arrays of one shape agree; NaN agrees with NaN, infinity with infinity."""
    finite = np.abs(right[np.isfinite(right)])
    scale = finite.max(initial=0.0) or 1.0
    return np.isclose(found, right, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def equal(found: np.ndarray, right: np.ndarray, tolerance: float = TOLERANCE) -> bool:
    """Whether an array is right."""
    return found.shape == right.shape and bool(agreeing(found, right, tolerance).all())


# ----------------------------------------------------------------------------
# the diagnosis
def symptom_of(examples: list[Example]) -> tuple[str, str]:
    """(a wrong result, its symptom in a sentence) of examples that are all wrong."""
    name = examples[0].wrong[0]
    sentence = known_mistake([*examples[0].right], examples)
    if sentence:
        return name, sentence
    its = Wrong(name, [one for one in examples if name in one.wrong])
    for judge in SYMPTOMS:
        sentence = judge(its)
        if sentence:
            return name, sentence
    sentence = known_mistake([name], its.examples)  # other results may have mistakes of their own
    return name, sentence or "other numbers, and none of the mistakes that are known here"


def known_mistake(names: list[str], examples: list[Example]) -> str:
    """The mistake that returns the same as the answer, in these results of all examples; or ""."""
    for number, (sentence, _) in enumerate(examples[0].mistakes):
        as_found = []
        for one in examples:
            _, returned = one.mistakes[number]
            as_found += [equal(one.found[name], returned[name]) for name in names]
        if all(as_found):
            return sentence
    return ""


class Wrong:
    """A result that is wrong in every one of some examples."""

    def __init__(self, name: str, examples: list[Example]):
        self.name = name
        self.examples = examples
        self.pairs = [(one.found[name], one.right[name]) for one in examples]  # (found, right)
        letters = examples[0].letters[name]
        self.axes = letters.split(", ") if letters else []


def explains(change: Callable, both: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Whether every array that was found is what `change` makes of the right one."""
    return all(equal(found, change(right)) for found, right in both)


def not_finite(its: Wrong) -> str:
    """NaN that should not be there, in any example."""
    if any(np.isnan(found).any() for found, _ in its.pairs):
        return (
            "NaN: an overflow in exp, 0/0, or infinity times 0. A softmax first subtracts "
            "each row's largest score, axis=-1 with keepdims=True"
        )
    return ""


def other_shape(its: Wrong) -> str:
    """Another shape, and how it comes from the right one."""
    both = its.pairs
    others = [pair for pair in both if pair[0].shape != pair[1].shape]
    if not others:
        return ""
    found, right = others[0]
    axes = ", ".join(its.axes)
    shapes = f"shape {found.shape}; expected ({axes}), here {right.shape}"

    order = transposition(both)
    if order:
        return f"transposed, axes in the order {order}: {shapes}"
    if all(one.size == two.size and equal(one.reshape(two.shape), two) for one, two in both):
        return f"the right numbers in another shape: {shapes}"
    if all(one.ndim == found.ndim for one, _ in both):
        more = max(1, found.ndim - right.ndim)
        for summed in itertools.combinations(range(found.ndim), more):
            if all(equal(one.sum(summed), two) for one, two in both):
                axis = ", ".join(map(str, summed))
                return f"not summed over axis {axis} of what you return: {shapes}"
    return f"another shape: {shapes}"


def transposition(both: list, inside: bool = False) -> tuple:
    """The order of axes in which all arrays that were found are the right ones, or ().

    inside: the transposed ones were given their shape before.
    """
    _, first = both[0]
    for order in itertools.permutations(range(first.ndim)):
        turned = [(found, right.transpose(order)) for found, right in both]
        if inside:
            turned = [(found, other.reshape(found.shape)) for found, other in turned]
        if all(equal(*pair) for pair in turned):
            return order
    return ()


def reordered(its: Wrong) -> str:
    """The right shape, and transposed inside it."""
    both = its.pairs
    order = transposition(both, inside=True)
    if not order:
        return ""
    is_plain = all(right.shape == right.transpose(order).shape for _, right in both)
    how = "transposed" if is_plain else "a reshape of a transposed array"
    return f"the right numbers in the wrong order, {how}, axes {order}"


def rounded(its: Wrong) -> str:
    """Right, but not in float64."""
    if not all(equal(*pair, ROUNDING) for pair in its.pairs):
        return ""
    return (
        "right except in float32: it agrees to 5 digits or more, not to 9. Something was "
        "rounded to float32, or a small constant is missing"
    )


def swapped(its: Wrong) -> str:
    """It is another result."""
    name = its.name
    for other in its.examples[0].right:
        if other != name and all(equal(one.found[name], one.right[other]) for one in its.examples):
            return f"it is {other}: results are in another order"
    return ""


def only_zeros(its: Wrong) -> str:
    """Zero where it should not be, or not zero where it should be, and right elsewhere."""
    stopped = []
    flows = []
    for found, right in its.pairs:
        wrong = ~agreeing(found, right)
        stopped.append(not found[wrong].any())
        flows.append(not right[wrong].any())
    is_gradient = its.name.startswith("d")
    if all(stopped):
        what = "no gradient flows where it should" if is_gradient else "zero where it should not be"
        return f"{what}; elsewhere it is right"
    if all(flows):
        what = "gradient flows where it must stop" if is_gradient else "not zero where it must be"
        return f"{what}; elsewhere it is right"
    return ""


def other_keys(its: Wrong) -> str:
    """A mask, or scores that are -inf where a key is hidden: keys too many or too few."""
    if all(right.dtype == bool and (found != right).all() for found, right in its.pairs):
        return "the mask is inverted: true where it must be false, and false where true"
    more = []
    less = []
    for found, right in its.pairs:
        seen = visible(found)
        should = visible(right)
        if right.dtype != bool and seen.all() and should.all():
            return ""
        more.append((seen & ~should).any())
        less.append((should & ~seen).any())
    if any(more) and any(less):
        return "keys are seen that must be hidden, and others are hidden"
    if any(more):
        return "a key too many is seen"
    return "a key too few is seen" if any(less) else ""


def visible(array: np.ndarray) -> np.ndarray:
    """Where a key is seen: a mask itself, or what is not -inf."""
    return array if array.dtype == bool else ~np.isneginf(array)


def factor(its: Wrong) -> str:
    """The same factor everywhere, and which."""
    ratios = []
    for found, right in its.pairs:
        if not np.isfinite(found).all() or not np.isfinite(right).all():
            return ""
        size = float((right.astype(float) ** 2).sum())
        ratio = float((found * right.astype(float)).sum()) / (size or 1.0)
        if not equal(found, ratio * right):
            return ""
        ratios.append(ratio)
    known = named_factor(ratios, its.examples)
    if known == "-1":
        return "the sign is wrong everywhere"
    if not known and all(right.size == 1 for _, right in its.pairs):
        return ""  # any two numbers have a factor
    by = known or "a constant, here " + ", ".join(f"{ratio:.4g}" for ratio in ratios[:3])
    return f"a factor: it is the right one times {by}"


def named_factor(ratios: list[float], examples: list[Example]) -> str:
    """The name that a factor has in all examples, such as sqrt(E), or ""."""
    for label in factors(examples[0].sizes):
        values = [factors(one.sizes)[label] for one in examples]
        if np.allclose(ratios, values, rtol=1e-7, atol=0.0):
            return label
    return ""


def factors(sizes: dict) -> dict[str, float]:
    """{name: value} of the factors that mistakes bring in."""
    known = {"2": 2, "4": 4} | sizes
    known |= {f"sqrt({letter})": math.sqrt(size) for letter, size in sizes.items()}
    inverse = {f"1/{label}": 1 / (value or 1) for label, value in known.items()}
    for (one, first), (two, second) in itertools.combinations(sizes.items(), 2):
        known[f"{one}*{two}"] = first * second
        inverse[f"1/({one}*{two})"] = 1 / (first * second or 1)
    known |= inverse
    negative = {f"-{label}": -value for label, value in known.items()}
    return {"-1": -1} | known | negative


def shifted(its: Wrong) -> str:
    """Right, but one place too far along an axis, or in reverse order."""
    both = its.pairs
    for axis, letter in enumerate(its.axes):
        along = [(np.moveaxis(one, axis, 0), np.moveaxis(two, axis, 0)) for one, two in both]
        several = [pair for pair in along if len(pair[1]) > 1]
        if several and explains(np.flipud, several):
            return f"in reverse order along {letter}"
        if several and all(equal(one[1:], two[:-1]) for one, two in several):
            return f"shifted by 1 along {letter}, too late"
        if several and all(equal(one[:-1], two[1:]) for one, two in several):
            return f"shifted by 1 along {letter}, too early"
    return ""


def other_lanes(its: Wrong) -> str:
    """A lane has what is another's, or only some lanes are right."""
    both = [pair for pair in its.pairs if pair[1].ndim and len(pair[1]) > 1]
    if not both or its.axes[0] != "B":
        return ""
    for words, order in LANES.items():
        if explains(order, both):
            return words
    return ""


LANES = {
    "every lane has the first lane's": lambda right: np.broadcast_to(right[:1], right.shape),
    "each lane has the next lane's": lambda right: np.roll(right, -1, axis=0),
}


# In the order of asking; the first that explains all examples is said
SYMPTOMS = (
    not_finite,
    swapped,
    other_shape,
    other_keys,
    rounded,
    only_zeros,
    factor,
    other_lanes,
    shifted,
    reordered,
)


# ----------------------------------------------------------------------------
# what is shown beside it
def where_wrong(found: np.ndarray, right: np.ndarray) -> str:
    """The place of the largest difference, with both numbers."""
    if found.shape != right.shape:
        return f"yours has shape {found.shape}, the right one {right.shape}"
    if right.size == 0:
        return "both are empty"
    wrong = ~agreeing(found, right)
    with np.errstate(invalid="ignore"):
        apart = np.where(wrong, np.nan_to_num(np.abs(found - right.astype(float)), nan=np.inf), -1)
    at = np.unravel_index(int(apart.argmax()), right.shape)
    place = ", ".join(str(int(i)) for i in at)
    return f"at [{place}] yours is {found[at]:.6g}, the right one {right[at]:.6g}"
