"""Lanes: each document is read once, window by window, in one lane; parts; joined documents."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from accelerated.data.lanes import (
    Lanes,
    cut_for_lanes,
    evenly_spread,
    joined_for_lanes,
)
from accelerated.data.windows import cut
from accelerated.program.errors import InputError
from tests.helpers.texts import documents_of

lengths = st.lists(st.integers(0, 23), min_size=1, max_size=6).filter(lambda ns: max(ns) > 1)
FIELDS = ("inputs", "targets", "scored")


def masked(ns):
    """Documents of these lengths, with some tokens not scored."""
    rng = np.random.default_rng(0)
    documents = []
    for document in documents_of(ns):
        inputs = document.inputs.astype(np.uint16)
        scored = rng.random(len(document.scored)) < 0.7
        documents.append(document._replace(inputs=inputs, scored=scored))
    return documents


@st.composite
def sizes(draw):
    """Return (lanes, length of a segment, overlap)."""
    lanes = draw(st.integers(1, 4))
    length = draw(st.integers(1, 7))
    return lanes, length, draw(st.integers(0, length - 1))


def expected_row(document, window, length):
    """What a lane holds of a window: tokens, targets, and what is scored; the rest is padding."""
    rows = [getattr(document, name)[window.start : window.stop].astype(int) for name in FIELDS]
    again = window.first - 1 - window.start  # predictions that the last window scored
    rows[2][:again] = 0
    return [np.pad(row, (0, length - len(row))).tolist() for row in rows]


def dealt(ns, size, seed=None, count=None):
    """(Documents in the order in which lanes begin them, all usable ones).

    Asserts that a lane reads each window by window, and that a single pass reads all, then ends.
    """
    lanes, length, overlap = size
    documents = masked(ns)
    windows = {number: cut(n, length, overlap) for number, n in enumerate(ns) if n > 1}
    unread = [[] for _ in range(lanes)]  # windows that each lane has yet to read of its document
    order = []
    dealer = Lanes(documents, lanes, length, seed, overlap)
    most = 6 * 22  # windows of 6 documents of 23 tokens
    for segment in itertools.islice(dealer, count or most + 1):
        assert len(segment.place) == lanes, "a row for each lane"
        for lane, (number, start) in enumerate(segment.place.tolist()):
            row = [field[lane].tolist() for field in segment[:3]]
            begins = bool(segment.starts[lane])
            if number < 0:
                assert seed is None, "passes never end"
                assert (start, begins, row) == (0, False, [[0] * length] * 3), "padding"
                continue
            assert begins == (not unread[lane]), "a document starts at its first window alone"
            if begins:
                order.append(number)
                unread[lane] = [(number, window) for window in windows[number]]
            expected, window = unread[lane].pop(0)
            assert (number, start) == (expected, window.start), "a lane reads another window"
            assert row == expected_row(documents[number], window, length), "tokens, targets, scored"
    if seed is None:
        assert not any(unread), "a single pass reads all"
        assert next(dealer, None) is None, "a single pass ends"
    return order, [*windows]


@given(ns=lengths, size=sizes())
def test_one_pass_reads_every_document_once_in_one_lane(ns, size):
    """The longest first; of windows that overlap each scores what the previous one has not."""
    order, usable = dealt(ns, size)
    assert order == sorted(usable, key=lambda number: -ns[number]), "the longest come first"


@given(ns=lengths, size=sizes(), seed=st.integers(0, 9))
def test_no_segment_holds_two_documents_and_padding_is_never_scored(ns, size, seed):
    """`dealt` asserts that. Here: with a seed each pass deals every document once, without end."""
    order, usable = dealt(ns, size, seed, count=20)
    for turn in range(0, len(order) - len(usable) + 1, len(usable)):
        assert sorted(order[turn : turn + len(usable)]) == usable, "a pass deals each once"


def test_shuffling_depends_on_seed_and_pass():
    def passes(seed):
        """The documents of two passes; each is one window."""
        read = Lanes(documents_of([5] * 30), 1, 4, seed).rollout(60)
        numbers = [segment.place[0, 0] for segment in read]
        return numbers[:30], numbers[30:]

    first, second = passes(0)
    assert (first, second) == passes(0), "a seed deals in one order"
    assert first != second, "the second pass has the order of the first"
    assert first != passes(1)[0], "another seed deals in the same order"


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("ns", [[], [0, 1]], ids=str)
def test_nothing_to_predict_is_refused(ns, seed):
    """It would be dealt for ever."""
    for documents in (documents_of(ns), joined_for_lanes(2, documents_of(ns), seed)):
        with pytest.raises(InputError, match="no document has two tokens"):
            next(Lanes(documents, 2, 4, seed))


@given(ns=lengths, count=st.integers(1, 9))
def test_parts_are_the_documents_cut_evenly(ns, count):
    """At least `count` parts if the tokens suffice, none empty, nothing lost.

    The longest documents are cut first: none stays whole that is longer than two parts of another.
    """
    documents = documents_of(ns)
    predictions = [max(n - 1, 0) for n in ns]
    parts = cut_for_lanes(count, documents)
    suffice = min(count, sum(predictions)) <= sum(n > 1 for n in ns)  # an empty one fills no lane
    assert (parts is documents) == suffice, "documents are cut only if there are too few"
    assume(not suffice)
    assert len(parts) >= min(count, sum(predictions)), "a lane has nothing to read"
    assert parts.lengths.tolist() == [len(part.inputs) for part in parts], "the parts' lengths"

    pieces = {number: [] for number, n in enumerate(ns) if n > 1}
    for part, (number, _, _) in zip(parts, parts.spans, strict=True):
        pieces[number].append(part)
    whole = []
    longest_part = 0
    for number, of_document in pieces.items():
        for name in FIELDS:
            joined = np.concatenate([getattr(part, name) for part in of_document])
            assert joined.tolist() == getattr(documents[number], name).tolist(), "parts lose text"
        found = [len(part.inputs) for part in of_document]
        assert min(found) > 0, "a part is empty"
        assert max(found) - min(found) <= 1, "parts of a document are not equal"
        if len(found) == 1:
            whole += found
        else:
            longest_part = max(longest_part, *found)
    assert max(whole, default=0) <= 2 * longest_part + 1, "a longer document is not cut"


@given(ns=lengths, tokens=st.integers(1, 60), longest=st.integers(1, 20))
def test_what_is_spread_comes_from_all_over_in_whole_pieces(ns, tokens, longest):
    """About as many tokens as asked, the same ones each time; documents stay whole unless long.

    No stretch is read more than another, except for one piece.
    """
    documents = documents_of(ns)
    predictions = [max(n - 1, 0) for n in ns]
    total = sum(predictions)
    taken = evenly_spread(documents, tokens, longest)
    assert (taken is documents) == (total <= tokens), "whether all is taken"
    assume(taken is not documents)
    assert taken.spans == evenly_spread(documents, tokens, longest).spans, "the same ones each time"
    assert taken.spans == sorted(set(taken.spans)), "a piece is taken twice, or out of order"

    before = np.cumsum([0, *predictions])
    read = np.zeros(total)
    for number, start, stop in taken.spans:
        read[before[number] + start : before[number] + stop] = 1
        is_whole = (start, stop) == (0, predictions[number])
        assert is_whole if predictions[number] <= longest else stop - start >= longest // 2, (
            "a short document is cut, or a long one in too small pieces"
        )
        assert stop - start <= longest, "a piece is too long"
    assert abs(read.sum() - tokens) <= longest / 2 + 1e-9, "how much is taken"
    asked = np.arange(1, total + 1) * tokens / total
    assert np.abs(np.cumsum(read) - asked).max() <= longest, "a stretch is read more"


@given(ns=lengths, lanes=st.integers(1, 4), seed=st.none() | st.integers(0, 9))
def test_a_joined_text_is_its_documents_one_after_another_in_equal_parts(ns, lanes, seed):
    """At a document's end the next one's first token is predicted, and not scored."""
    documents = masked(ns)
    parts = joined_for_lanes(lanes, documents, seed)
    order = [number for number, n in enumerate(ns) if n > 1]
    if seed is not None:
        order = np.random.default_rng(seed).permutation(order).tolist()
    tokens = []
    scored = []
    for number in order:
        tokens += [*documents[number].inputs.tolist(), int(documents[number].targets[-1])]
        scored += [*documents[number].scored.tolist(), False]

    expected = {"inputs": tokens[:-1], "targets": tokens[1:], "scored": scored[:-1]}
    for name, row in expected.items():
        found = np.concatenate([getattr(part, name) for part in parts]).tolist()
        assert found == row, f"{name} of the joined text: look at joined_for_lanes"
    part_sizes = [len(part.inputs) for part in parts]
    asked = sum(max(0, n - 1) for n in ns)  # predictions inside documents
    assert len(parts) == min(lanes, asked), "a part for each lane"
    assert max(part_sizes) - min(part_sizes) <= 1, "parts are not equal"
    assert parts[0].inputs.dtype == documents[0].inputs.dtype, "joined ids take more memory"
