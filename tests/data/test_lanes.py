"""Lanes: every document is read once, contiguously, in one lane; parts of documents; resuming."""

import itertools

import numpy as np
import pytest
import torch
from documents import documents_of
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.lanes import Lanes, Parts, cut_for_lanes, independent_windows, longest_document, one_pass
from accelerated.data.windows import cut
from accelerated.errors import InputError


def read_lanes(segments, lanes):
    """Per lane the list of documents read, each as ([tokens], [targets]), from starts and scored alone."""
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


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7))
def test_one_pass_reads_every_document_once_in_one_lane(ns, lanes, length):
    documents = documents_of(ns)
    read = read_lanes(Lanes(documents, lanes, length), lanes)
    seen = sorted(tuple(map(tuple, document)) for lane in read for document in lane)
    expected = sorted((tuple(d.inputs.tolist()), tuple(d.targets.tolist())) for d in documents if len(d.inputs))
    assert seen == expected


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7), seed=st.integers(0, 9))
def test_no_segment_holds_two_documents_and_padding_is_never_scored(ns, lanes, length, seed):
    documents = documents_of(ns)
    whole = {tuple(d.inputs.tolist()): tuple(d.targets.tolist()) for d in documents if len(d.inputs)}
    for segment in itertools.islice(Lanes(documents, lanes, length, seed), 20):
        for lane in range(lanes):
            scored = segment.scored[lane].tolist()
            size = sum(scored)
            assert size and scored == [True] * size + [False] * (length - size), "padding stands at the end"
            tokens, targets = (tuple(field[lane][:size].tolist()) for field in (segment.tokens, segment.targets))
            assert any(
                tokens == key[i : i + size] and targets == whole[key][i : i + size] for key in whole for i in range(len(key))
            )


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7), data=st.data())
def test_overlapping_segments_score_every_token_once(ns, lanes, length, data):
    """Lane by lane, contiguously; each segment begins with the last tokens of the one before, which are not scored again."""
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
    """The same segments as Lanes in the rows that are left, which are named by their place in the segment before."""
    documents, rows = documents_of(ns), list(range(lanes))
    whole = Lanes(documents, lanes, length)
    for (segment, kept), full in zip(one_pass(documents, lanes, length), whole, strict=True):
        rows = [rows[row] for row in kept]
        assert rows == [lane for lane in range(lanes) if full.scored[lane].any()]
        fields, expected = (*segment[:4], segment.place), (*full[:4], full.place)
        assert all(torch.equal(a, b[rows]) for a, b in zip(fields, expected, strict=True))


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


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7), after=st.integers(0, 12))
def test_seek_continues_where_position_was_taken(ns, lanes, length, after):
    documents = documents_of(ns)
    first, second = Lanes(documents, lanes, length, 3), Lanes(documents, lanes, length, 3)
    for _ in range(after):
        next(first)
    second.seek(first.position())
    for _ in range(8):
        for a, b in zip(next(first)[:4], next(second)[:4], strict=True):  # the fifth is a task: there is none
            assert torch.equal(a, b)


def test_nothing_to_predict_is_refused():
    with pytest.raises(InputError, match="no document has two tokens"):
        Lanes(documents_of([0, 1]), 2, 4)


@given(ns=lengths, lanes=st.integers(1, 4), length=st.integers(1, 7), data=st.data())
def test_a_segment_names_the_place_of_every_row(ns, lanes, length, data):
    """Document and first token, from which its tokens can be found again; padding has no document."""
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
    """As many as there are lanes where the tokens allow it, none empty, nothing lost, the longest cut first."""
    documents = documents_of(ns)
    parts, predictions = Parts(documents, count), sum(max(n - 1, 0) for n in ns)
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


def test_documents_are_cut_only_where_there_are_too_few():
    documents = documents_of([9, 1, 5, 7])
    assert cut_for_lanes(3, documents) is documents
    assert isinstance(cut_for_lanes(4, documents), Parts), "a document without a prediction fills no lane"
    parts = cut_for_lanes(6, documents)
    assert isinstance(parts, Parts) and parts.lengths.tolist() == [2, 3, 3, 4, 3, 3] and longest_document(parts, 2) == 2
    lanes = Lanes(parts, 6, 2, seed=0)
    assert len({tuple(row.tolist()) for row in next(lanes).tokens}) == 6, "no lane reads what another does"
