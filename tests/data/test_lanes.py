"""Lanes: every document is read once, contiguously, in one lane; parts of documents; resuming."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from accelerated.data.lanes import (
    Joined,
    Lanes,
    Parts,
    cut_for_lanes,
    independent_windows,
    joined_for_lanes,
    longest_document,
    one_pass,
    spread,
)
from accelerated.data.windows import Documents, count_windows, cut, lengths_of
from accelerated.program.errors import InputError
from tests.helpers.texts import documents_of


def read_lanes(segments, lanes):
    """Return for each lane the documents read, each as ([tokens], [targets]), from `starts` and `scored` alone."""
    read = [[] for _ in range(lanes)]
    for segment in segments:
        for lane in range(lanes):
            scored = segment.scored[lane]
            if segment.starts[lane]:
                read[lane].append(([], []))
            if scored.any():
                read[lane][-1][0].extend(segment.tokens[lane][scored].tolist())
                read[lane][-1][1].extend(segment.targets[lane][scored].tolist())
    return read


lengths = st.lists(st.integers(0, 23), min_size=1, max_size=6).filter(lambda ns: max(ns) > 1)


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7), seed=st.integers(0, 9))
def test_no_segment_holds_two_documents_and_padding_is_never_scored(ns, lanes, length, seed):
    documents = documents_of(ns)
    whole = {tuple(d.inputs.tolist()): tuple(d.targets.tolist()) for d in documents if len(d.inputs)}
    for segment in itertools.islice(Lanes(documents, lanes, length, seed), 20):
        for lane in range(lanes):
            scored = segment.scored[lane].tolist()
            size = sum(scored)
            assert size and scored == [True] * size + [False] * (length - size), "padding is at the end"
            tokens, targets = (tuple(field[lane][:size].tolist()) for field in (segment.tokens, segment.targets))
            assert any(
                tokens == key[i : i + size] and targets == whole[key][i : i + size] for key in whole for i in range(len(key))
            )


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7), data=st.data())
def test_one_pass_reads_every_document_once_in_one_lane(ns, lanes, length, data):
    """With an overlap a segment begins with the last tokens of the previous one, which are not scored again."""
    overlap, documents = data.draw(st.integers(0, length - 1)), documents_of(ns)
    read = read_lanes(Lanes(documents, lanes, length, overlap=overlap), lanes)
    seen = sorted(tuple(map(tuple, document)) for lane in read for document in lane)
    assert seen == sorted((tuple(d.inputs.tolist()), tuple(d.targets.tolist())) for d in documents if len(d.inputs))
    last = [None] * lanes
    for segment in Lanes(documents, lanes, length, overlap=overlap):
        for lane in range(lanes):
            row, idle = segment.tokens[lane].tolist(), not segment.scored[lane].any()
            if not idle and not segment.starts[lane]:
                assert row[:overlap] == last[lane][length - overlap :] and not segment.scored[lane, :overlap].any()
            last[lane] = row


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7), data=st.data())
def test_independent_windows_are_all_windows(ns, lanes, length, data):
    overlap, documents = data.draw(st.integers(0, length - 1)), documents_of(ns)
    windows = [(d, w) for d in documents for w in cut(len(d.inputs) + 1, length, overlap)]
    segments = list(independent_windows(documents, lanes, length, overlap))
    assert len(segments) == -(-len(windows) // lanes)
    assert all(bool(s.starts[row]) for s in segments for row in range(lanes) if s.scored[row].any()), "each begins anew"
    rows = [row for segment in segments for row in zip(*segment[:4], strict=True)]
    for (tokens, targets, scored, _), (document, window) in zip(rows, windows, strict=False):
        size = window.stop - window.start
        assert tokens[:size].tolist() == document.inputs[window.start : window.stop].tolist()
        assert targets[scored].tolist() == document.targets[window.first - 1 : window.stop].tolist()
        assert not scored[: window.first - 1 - window.start].any() and not scored[size:].any()
    assert not any(scored.any() for _, _, scored, _ in rows[len(windows) :])


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7))
def test_one_pass_leaves_out_lanes_that_have_ended(ns, lanes, length):
    """The remaining rows equal those of Lanes; `kept` names them by their row in the previous segment."""
    documents, rows = documents_of(ns), list(range(lanes))
    whole = Lanes(documents, lanes, length)
    for (segment, kept), full in zip(one_pass(documents, lanes, length), whole, strict=True):
        rows = [rows[row] for row in kept]
        assert rows == [lane for lane in range(lanes) if full.scored[lane].any()]
        assert all(torch.equal(a, b[rows]) for a, b in zip(segment[:4], full[:4], strict=True))
        assert (segment.place == full.place[rows]).all()


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7), seed=st.integers(0, 9))
def test_every_pass_deals_every_document_once(ns, lanes, length, seed):
    documents = documents_of(ns)
    usable = sum(n > 1 for n in ns)
    dealer = Lanes(documents, lanes, length, seed)
    dealt = [dealer._next_document() for _ in range(3 * usable)]
    for turn in range(3):
        assert sorted(dealt[turn * usable : (turn + 1) * usable]) == [i for i, n in enumerate(ns) if n > 1]


def test_shuffling_depends_on_seed_and_pass():
    documents = documents_of([5] * 30)
    orders = [Lanes(documents, 1, 4, seed)._shuffle(passes).tolist() for seed, passes in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert orders[0] == orders[1] and orders[0] != orders[2] and orders[0] != orders[3]
    dealer = Lanes(documents, 1, 4, 0)
    dealt = [[dealer._next_document() for _ in range(30)] for _ in range(3)]
    assert dealt == [dealer._shuffle(passes).tolist() for passes in range(3)] and dealt[1] != dealt[2] and dealer.passes == 2


def test_a_single_pass_deals_long_documents_first():
    dealer = Lanes(documents_of([3, 9, 5, 9]), 1, 4)
    assert [dealer._next_document() for _ in range(5)] == [1, 3, 2, 0, None]


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7), after=st.integers(0, 12))
def test_seek_continues_where_position_was_taken(ns, lanes, length, after):
    documents = documents_of(ns)
    first, second = Lanes(documents, lanes, length, 3), Lanes(documents, lanes, length, 3)
    for _ in range(after):
        next(first)
    second.seek(first.position())
    for _ in range(8):
        for a, b in zip(next(first)[:4], next(second)[:4], strict=True):  # without the fifth, the task, which is None
            assert torch.equal(a, b)


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7), moved=st.sampled_from([None, "cpu", "meta"]))
def test_a_segment_knows_what_starts_and_how_much_is_scored(ns, lanes, length, moved):
    """Also of some of its lanes, and on a device that cannot be asked for numbers."""
    for segment in Lanes(documents_of(ns), lanes, length):
        for rows in (slice(None), slice(lanes // 2, lanes), [lanes - 1, 0]):
            starts, scored = segment.starts[rows], segment.scored[rows]
            part = segment.to(torch.device(moved)) if moved else segment
            for some in (part.keep_lanes(rows), part.keep_lanes(rows).to(torch.device(moved or "cpu"))):
                assert (some.any_starts, some.count_scored) == (bool(starts.any()), int(scored.sum()))
                assert type(some.any_starts) is bool and type(some.count_scored) is int
                assert some.tokens.device.type == (moved or "cpu") and some.place.tolist() == segment.place[rows].tolist()


def test_nothing_to_predict_is_refused():
    with pytest.raises(InputError, match="no document has two tokens"):
        Lanes(documents_of([0, 1]), 2, 4)


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7), data=st.data())
def test_a_segment_names_the_place_of_every_row(ns, lanes, length, data):
    """Its document and first token, which lead back to its tokens; padding has no document."""
    overlap, documents = data.draw(st.integers(0, length - 1)), documents_of(ns)
    for segment in [*Lanes(documents, lanes, length, overlap=overlap), *independent_windows(documents, lanes, length, overlap)]:
        for row, (number, first) in enumerate(segment.place.tolist()):
            size = max(np.flatnonzero(segment.scored[row]), default=-1) + 1
            if number < 0:
                assert (number, first, size) == (-1, 0, 0)
                continue
            assert segment.tokens[row, :size].tolist() == documents[number].inputs[first : first + size].tolist()
            assert bool(segment.starts[row]) or first > 0


@given(ns=lengths, count=st.integers(1, 9))
def test_parts_are_the_documents_cut_evenly(ns, count):
    """At least `count` parts if the tokens suffice, none empty, nothing lost, the longest document cut first."""
    documents = documents_of(ns)
    parts, predictions = cut_for_lanes(count, documents), sum(max(n - 1, 0) for n in ns)
    assume(parts is not documents)
    assert sum(len(d.targets) for d in parts) == predictions
    assert all(len(d.inputs) == n > 0 for d, n in zip(parts, parts.lengths, strict=True))
    assert len(parts) >= min(count, predictions)
    joined = {}
    for part, (number, start, _) in zip(parts, parts.spans, strict=True):
        joined.setdefault(number, []).append((start, part.targets.tolist()))
    for number, pieces in joined.items():
        assert [t for _, piece in sorted(pieces) for t in piece] == documents[number].targets.tolist()
        sizes = [len(piece) for _, piece in pieces]
        assert max(sizes) - min(sizes) <= 1
    if len(parts) > len(documents):
        whole = max((len(documents[n].targets) for n, pieces in joined.items() if len(pieces) == 1), default=0)
        assert whole <= 2 * max(len(piece) for pieces in joined.values() if len(pieces) > 1 for _, piece in pieces) + 1


@given(ns=lengths, tokens=st.integers(1, 60), longest=st.integers(1, 20))
def test_what_is_spread_comes_from_all_over(ns, tokens, longest):
    """Always the same pieces, in order, none twice; whole documents unless they are long; about as many tokens as asked for."""
    documents = documents_of(ns)
    total = sum(max(n - 1, 0) for n in ns)
    taken = spread(documents, tokens, longest)
    if total <= tokens:
        assert taken is documents
        return
    assert taken.spans == spread(documents, tokens, longest).spans == sorted(set(taken.spans))
    assert all(stop - start <= longest for _, start, stop in taken.spans)
    for number, start, stop in taken.spans:
        whole = len(documents[number].targets)
        assert (start, stop) == (0, whole) if whole <= longest else stop - start >= longest // 2
    assert abs(int(taken.lengths.sum()) - tokens) <= longest
    before = np.cumsum([0, *(max(n - 1, 0) for n in ns)])  # predictions before each document
    read = np.zeros(total)
    for number, start, stop in taken.spans:
        read[before[number] + start : before[number] + stop] = 1
    error = np.cumsum(read) - np.arange(1, total + 1) * tokens / total
    assert np.abs(error).max() <= longest, "no stretch of the text is read more than another, but for one piece"


def test_a_single_book_is_read_at_its_beginning_middle_and_end():
    [book] = documents_of([101])
    parts = spread([book], tokens=20, longest=5)
    assert parts.spans == [(0, 10, 15), (0, 35, 40), (0, 60, 65), (0, 85, 90)]
    assert [part.targets.tolist() for part in parts] == [book.targets[a:b].tolist() for _, a, b in parts.spans]


def test_documents_are_cut_only_if_there_are_too_few():
    documents = documents_of([9, 1, 5, 7])
    assert cut_for_lanes(3, documents) is documents
    assert isinstance(cut_for_lanes(4, documents), Parts), "a document without a prediction fills no lane"
    parts = cut_for_lanes(6, documents)
    assert isinstance(parts, Parts) and parts.lengths.tolist() == [2, 3, 3, 4, 3, 3] and longest_document(parts, 2) == 2
    lanes = Lanes(parts, 6, 2, seed=0)
    assert len({tuple(row.tolist()) for row in next(lanes).tokens}) == 6, "no two lanes read the same text"


# Documents that are joined


def masked(documents, seed):
    """The documents, with some tokens not scored."""
    rng = np.random.default_rng(seed)
    return [document._replace(scored=rng.random(len(document.scored)) < 0.7) for document in documents]


def by_hand(documents, order):
    """Return (inputs, targets, scored) of the documents joined in that order, as lists."""
    tokens, scored = [], []
    for document in (documents[number] for number in order if len(documents[number].inputs)):
        tokens += [*document.inputs.tolist(), int(document.targets[-1])]
        scored += [*document.scored.tolist(), False]
    return tokens[:-1], tokens[1:], scored[:-1]


@given(ns=lengths, seed=st.none() | st.integers(0, 9), data=st.data())
def test_a_joined_text_is_its_documents_one_after_another(ns, seed, data):
    documents = masked(documents_of(ns), 0)
    joined = Joined(documents, seed)
    assert sorted(joined.order) == [number for number, n in enumerate(ns) if n > 1]
    assert seed is not None or joined.order == sorted(joined.order)
    [document] = joined
    assert len(document.inputs) == len(document.targets) == len(document.scored) == lengths_of(joined)[0]
    bound = st.none() | st.integers(-9, 70)
    span, within = slice(data.draw(bound), data.draw(bound)), slice(data.draw(bound), data.draw(bound))
    for field, expected in zip(document[1:4], by_hand(documents, joined.order), strict=True):
        assert np.asarray(field).tolist() == expected
        assert np.asarray(field[span]).tolist() == expected[span] and len(field[span]) == len(expected[span])
        assert np.asarray(field[span][within]).tolist() == expected[span][within]
        assert np.asarray(field, np.float64).dtype == np.float64
    with pytest.raises(IndexError):
        document.inputs[::2]


def test_a_seed_shuffles_the_joined_documents():
    documents = documents_of([5] * 30)
    orders = [Joined(documents, seed).order for seed in (0, 0, 1, None)]
    assert orders[0] == orders[1] and orders[0] != orders[2] and orders[3] == list(range(30)) != orders[0]


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7), seed=st.none() | st.integers(0, 9), data=st.data())
def test_in_joined_documents_every_token_is_scored_once_in_order_and_state_starts_at_parts_alone(ns, lanes, length, seed, data):
    """One pass scores the same tokens as without joining, with padding only at the end of a part."""
    documents, overlap = masked(documents_of(ns), 1), data.draw(st.integers(0, length - 1))
    parts, order = joined_for_lanes(lanes, documents, seed), Joined(documents, seed).order
    inputs, targets, scored = by_hand(documents, order)
    assert len(parts) == min(lanes, len(inputs)) and max(parts.lengths) - min(parts.lengths) <= 1
    offsets, read, met = np.cumsum([0, *parts.lengths]), [0] * len(parts), np.zeros(len(inputs), int)
    longest = count_windows(int(max(parts.lengths)) + 1, length, overlap)
    for segment in itertools.islice(Lanes(parts, lanes, length, seed, overlap), longest):
        for row, (number, first) in enumerate(segment.place.tolist()):
            assert bool(segment.starts[row]) == (number >= 0 and first == 0), "the state starts where a part does"
            if number < 0 or (first == 0 and read[number]):  # padding, or the next pass
                continue
            size = min(length, int(parts.lengths[number]) - first)
            assert first == max(0, read[number] - overlap), "contiguous"
            at = offsets[number] + first + np.arange(size)
            assert segment.tokens[row, :size].tolist() == [inputs[i] for i in at]
            assert segment.targets[row, :size].tolist() == [targets[i] for i in at]
            assert not segment.scored[row, size:].any()
            met[at[segment.scored[row, :size].numpy()]] += 1
            read[number] = first + size
    assert read == parts.lengths.tolist() and met.astype(bool).tolist() == scored and met.max() <= 1
    assert met.sum() == sum(int(document.scored.sum()) for document in documents)


def test_every_pass_starts_each_part_once():
    lanes = Lanes(joined_for_lanes(2, documents_of([9, 4, 8, 4]), 0), 2, 4, seed=0)  # 24 predictions, 3 segments in each part
    assert [segment.starts.tolist() for segment in itertools.islice(lanes, 9)] == 3 * [[True] * 2, [False] * 2, [False] * 2]


class Watched(Documents):
    """Documents that count how often each is read."""

    def __init__(self, documents):
        self.documents, self.lengths, self.read = documents, lengths_of(documents), []

    def __getitem__(self, index):
        self.read.append(index)
        return self.documents[index]


def test_joining_reads_only_the_documents_that_a_segment_needs():
    documents = Watched(documents_of([6] * 50))
    parts = joined_for_lanes(2, documents)
    lanes = Lanes(parts, 2, 4)
    assert not documents.read and longest_document(parts, 4) == 38
    next(lanes)
    assert set(documents.read) == {0, 24, 25}, "the second part begins with the last token of 24 and the first of 25"


@given(ns=lengths, lanes=st.integers(1, 4), seed=st.none() | st.integers(0, 9))
def test_values_of_parts_are_split_into_their_documents(ns, lanes, seed):
    documents = documents_of(ns)
    values = [part.targets for part in joined_for_lanes(lanes, documents, seed)]
    split = Joined(documents, seed).by_document(values)
    assert [targets.tolist() for targets in split] == [document.targets.tolist() for document in documents]


def test_nothing_to_join_is_nothing_to_predict():
    for ns in ([], [0, 1]):
        [document] = Joined(documents_of(ns))
        assert not len(document.inputs) and np.asarray(document.scored).dtype == bool
        with pytest.raises(InputError, match="no document has two tokens"):
            Lanes(joined_for_lanes(2, documents_of(ns)), 2, 4)
