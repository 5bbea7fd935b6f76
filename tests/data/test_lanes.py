"""Lanes: every document is read once, window by window, in one lane; parts of documents; joined documents; resuming."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from accelerated.data.lanes import Lanes, Parts, cut_for_lanes, joined_for_lanes, spread
from accelerated.data.windows import cut
from accelerated.program.errors import InputError
from tests.helpers.texts import documents_of

lengths = st.lists(st.integers(0, 23), min_size=1, max_size=6).filter(lambda ns: max(ns) > 1)


def masked(ns):
    """Documents of these lengths, with some tokens not scored."""
    rng = np.random.default_rng(0)
    return [
        document._replace(
            inputs=document.inputs.astype(np.uint16), scored=rng.random(len(document.scored)) < 0.7
        )
        for document in documents_of(ns)
    ]


@st.composite
def sizes(draw):
    """Return (lanes, length of a segment, overlap)."""
    length = draw(st.integers(1, 7))
    return draw(st.integers(1, 4)), length, draw(st.integers(0, length - 1))


def is_window(segment, row, document, window):
    """Whether a row has the window's tokens and targets, scores its predictions alone, and is otherwise padding."""
    size, again = (
        window.stop - window.start,
        window.first - 1 - window.start,
    )  # again: predictions that the last window scored
    expected = np.zeros((3, segment.tokens.shape[1]), np.int64)  # inputs, targets, scored
    expected[:, :size] = [field[window.start : window.stop] for field in document[1:4]]
    expected[2, :again] = 0
    return [field[row].tolist() for field in segment[:3]] == expected.tolist()


def dealt(ns, size, seed=None, count=None):
    """(Documents in the order in which lanes begin them, all usable ones); asserts that a lane reads each window by window."""
    (lanes, length, overlap), documents = size, masked(ns)
    windows = {number: cut(n, length, overlap) for number, n in enumerate(ns) if n > 1}
    unread, order = (
        [()] * lanes,
        [],
    )  # [(document, window)] that each lane has yet to read of its document
    dealer = Lanes(documents, lanes, length, seed, overlap)
    for segment in itertools.islice(
        dealer, count or 150
    ):  # 6 documents of 23 tokens have 6 x 22 = 132 windows at most
        for lane, (number, start) in enumerate(segment.place.tolist()):
            if not unread[lane] and segment.starts[lane]:
                order.append(number)
                unread[lane] = [(number, window) for window in windows[number]]
            elif not unread[
                lane
            ]:  # padding: no place, and tokens, targets, scored and starts are all zero
                assert (
                    seed is None
                    and (number, start) == (-1, 0)
                    and not sum(field[lane].sum() for field in segment[:4])
                )
                continue
            else:
                assert not segment.starts[lane], "a document starts at its first window alone"
            (expected, window), *unread[lane] = unread[lane]
            assert (expected, window.start) == (number, start) and is_window(
                segment, lane, documents[number], window
            )
    assert seed is not None or (not any(unread) and next(dealer, None) is None), (
        "a single pass reads all, then ends"
    )
    return order, [*windows]


@given(ns=lengths, size=sizes())
def test_one_pass_reads_every_document_once_in_one_lane(ns, size):
    """The longest first; of windows that overlap each scores what the previous one has not."""
    order, usable = dealt(ns, size)
    assert order == sorted(usable, key=lambda number: -ns[number])


@given(ns=lengths, size=sizes(), seed=st.integers(0, 9))
def test_no_segment_holds_two_documents_and_padding_is_never_scored(ns, size, seed):
    """`dealt` asserts that. Here: with a seed passes never end, and each deals every document once."""
    order, usable = dealt(ns, size, seed, count=20)
    for turn in range(0, len(order) - len(usable) + 1, len(usable)):
        assert sorted(order[turn : turn + len(usable)]) == usable


def test_shuffling_depends_on_seed_and_pass():
    documents = documents_of([5] * 30)
    dealer = Lanes(documents, 1, 4, 0)
    passes = [[dealer._next_document() for _ in range(30)] for _ in range(3)]
    assert (
        passes == [Lanes(documents, 1, 4, 0)._shuffle(number).tolist() for number in range(3)]
        and dealer.passes == 2
    )
    assert passes[0] != passes[1] and passes[0] != Lanes(documents, 1, 4, 1)._shuffle(0).tolist()


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("ns", [[], [0, 1]], ids=str)
def test_nothing_to_predict_is_refused(ns, seed):
    """It would be dealt for ever."""
    for documents in (documents_of(ns), joined_for_lanes(2, documents_of(ns), seed)):
        with pytest.raises(InputError, match="no document has two tokens"):
            next(Lanes(documents, 2, 4, seed))


@given(ns=lengths, count=st.integers(1, 9))
def test_parts_are_the_documents_cut_evenly(ns, count):
    """At least `count` parts if the tokens suffice, none empty, nothing lost, the longest document cut first."""
    documents, predictions = documents_of(ns), sum(max(n - 1, 0) for n in ns)
    parts = cut_for_lanes(count, documents)
    assume(parts is not documents)
    assert len(parts) >= min(count, predictions) and parts.lengths.tolist() == [
        len(d.inputs) for d in parts
    ]
    pieces = {number: [] for number, n in enumerate(ns) if n > 1}
    for part, (number, *_) in zip(parts, parts.spans, strict=True):
        pieces[number].append(part)
    for number, cut_up in pieces.items():
        for field in (1, 2, 3):
            assert (
                np.concatenate([part[field] for part in cut_up]).tolist()
                == documents[number][field].tolist()
            )
        found = [len(part.inputs) for part in cut_up]
        assert min(found) > 0 and max(found) - min(found) <= 1
    if len(parts) > len(documents):
        whole = max((ns[n] - 1 for n, cut_up in pieces.items() if len(cut_up) == 1), default=0)
        assert (
            whole
            <= 2
            * max(
                len(part.inputs) for cut_up in pieces.values() if len(cut_up) > 1 for part in cut_up
            )
            + 1
        )


def test_documents_are_cut_only_if_there_are_too_few():
    documents = documents_of([9, 1, 5, 7])
    assert cut_for_lanes(3, documents) is documents
    assert isinstance(cut_for_lanes(4, documents), Parts), (
        "a document without a prediction fills no lane"
    )
    parts = cut_for_lanes(6, documents)
    assert parts.lengths.tolist() == [2, 3, 3, 4, 3, 3]
    assert len({tuple(row.tolist()) for row in next(Lanes(parts, 6, 2, seed=0)).tokens}) == 6, (
        "no two lanes read the same"
    )


@given(ns=lengths, tokens=st.integers(1, 60), longest=st.integers(1, 20))
def test_what_is_spread_comes_from_all_over(ns, tokens, longest):
    """The same pieces each time, in order, none twice; whole documents unless they are long; about as many tokens as asked."""
    documents, predictions = documents_of(ns), [max(n - 1, 0) for n in ns]
    taken, total = spread(documents, tokens, longest), sum(predictions)
    if total <= tokens:
        assert taken is documents
        return
    assert taken.spans == spread(documents, tokens, longest).spans == sorted(set(taken.spans))
    before, read = np.cumsum([0, *predictions]), np.zeros(total)
    for number, start, stop in taken.spans:
        whole = predictions[number]
        assert (
            (start, stop) == (0, whole)
            if whole <= longest
            else longest // 2 <= stop - start <= longest
        )
        read[before[number] + start : before[number] + stop] = 1
    assert abs(int(taken.lengths.sum()) - tokens) <= longest
    error = np.cumsum(read) - np.arange(1, total + 1) * tokens / total
    assert np.abs(error).max() <= longest, (
        "no stretch of the text is read more than another, but for one piece"
    )


@given(ns=lengths, lanes=st.integers(1, 4), seed=st.none() | st.integers(0, 9))
def test_a_joined_text_is_its_documents_one_after_another_in_equal_parts(ns, lanes, seed):
    """At a document's end the next one's first token is predicted, and not scored."""
    documents, parts = masked(ns), joined_for_lanes(lanes, masked(ns), seed)
    order = [number for number, n in enumerate(ns) if n > 1]
    order = order if seed is None else np.random.default_rng(seed).permutation(order).tolist()
    tokens, scored = [], []
    for number in order:
        tokens += [*documents[number].inputs.tolist(), int(documents[number].targets[-1])]
        scored += [*documents[number].scored.tolist(), False]
    sizes = [len(part.inputs) for part in parts]
    assert len(parts) == max(1, min(lanes, len(tokens) - 1)) and max(sizes) - min(sizes) <= 1
    joined = [np.concatenate([part[field] for part in parts]).tolist() for field in (1, 2, 3)]
    assert joined == [tokens[:-1], tokens[1:], scored[:-1]]
    assert not tokens or parts[0].inputs.dtype == documents[0].inputs.dtype
