"""Documents at the edge: of one token, of two, of 50,000; restarts of all lanes at once; rollouts with nothing to score."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated import replay
from accelerated.data.lanes import Lanes
from accelerated.data.windows import Document, cut, overlap_of
from accelerated.evaluation.score import evaluate, token_nats
from accelerated.protocol import require_gradient
from tests.conftest import examples
from tests.helpers.comparison import LADDER, assert_agree
from tests.helpers.programs import ROOT
from tests.helpers.rollouts import (
    agreed,
    back_propagated,
    both_sides,
    random_rows,
    starting,
    torch_segments,
)
from tests.helpers.texts import BYTES, documents_of
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over, variant


def unscored(segments):
    """The segments with no prediction scored."""
    return [(tokens, targets, np.zeros(scored.shape, bool)) for tokens, targets, scored in segments]


def reference_nats(paper, params, config, document):
    """-log p of every target of a document (n - 1,), read alone by the reference."""
    ref, found = PAPERS[paper].reference, [np.empty(0)]
    state = ref.initial_state(params, config, 1)
    for window in cut(len(document.inputs) + 1, config.segment, overlap_of(config)):
        size, first = window.stop - window.start, window.first - 1 - window.start
        tokens = np.zeros((1, config.segment), int)
        tokens[0, :size] = document.inputs[window.start : window.stop]
        logits, state, _ = ref.forward(params, config, tokens, state)
        aims = document.targets[window.start : window.stop].astype(int)
        own = [ref.cross_entropy_forward(logits[:, [i]], aims[None, [i]], np.ones((1, 1), bool))[0] for i in range(first, size)]
        found.append(np.array(own))
    return np.concatenate(found)


# Documents with little or nothing to predict


@over(ONE_OF_EACH)
@examples(6)
@given(
    lengths=st.lists(st.sampled_from(["none", "one", "two", "a segment", "one more", "some"]), max_size=5), at=st.integers(0, 5)
)
def test_documents_of_no_one_and_two_tokens_are_scored_beside_others_as_alone(paper, name, lengths, at):
    """Every token has the reference's loss; documents with nothing to predict have none, and change nothing."""
    config = dataclasses.replace(variant(paper, name), vocabulary=256)
    sizes = {"none": 0, "one": 1, "two": 2, "a segment": config.segment + 1, "one more": config.segment + 2, "some": 9}
    documents = documents_of([sizes[each] for each in [*lengths[:at], "some", *lengths[at:]]])
    params = PAPERS[paper].random_params(config, np.random.default_rng(5))
    model = PAPERS[paper].model_with(params, config)
    expected = {str(i): reference_nats(paper, params, config, each) for i, each in enumerate(documents)}
    score, actual = evaluate(model, documents, BYTES, 2), token_nats(model, documents, 2)
    assert score.tokens == sum(len(nats) for nats in expected.values())
    assert_agree(expected, {str(i): nats for i, nats in enumerate(actual)}, LADDER)
    assert score.nats == pytest.approx(sum(nats.sum() for nats in expected.values()), rel=LADDER)


@over([*ONE_OF_EACH, ("compressive", "conv-attention_reconstruction"), ("compressive", "dilated_conv-auto_encoding")])
def test_a_rollout_with_nothing_scored_has_no_loss_and_gives_no_gradient(paper, name, monkeypatch):
    """Exactly zero, by all methods and both ways of leaving out rows; an auxiliary loss trains only what is its own."""
    config, rng, _, _, model, _ = both_sides(paper, name)
    rows, auxiliary = unscored(random_rows(config, rng)), {id(p) for p in model.auxiliary_parameters()}
    own = {n for n, p in model.named_parameters() if id(p) in auxiliary}
    for host in (True, False):
        monkeypatch.setattr(replay, "on_host", lambda tensor, host=host: host)
        found = agreed(paper, config, rows, starting(0, 2))
        assert found["loss"] == 0 and {n for n, _ in model.named_parameters() if found[n].any()} == own


@over(ONE_OF_EACH)
@examples(6)
@given(lengths=st.lists(st.integers(2, 20), min_size=1, max_size=4), lanes=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_horizon_longer_than_its_documents_is_equal_on_both_sides(paper, name, lengths, lanes, seed):
    """Six segments of documents of one to three, as training deals them: starts are anywhere, windows may overlap."""
    config, rng = variant(paper, name), np.random.default_rng(seed)
    texts = [rng.integers(config.vocabulary, size=length) for length in lengths]
    documents = [Document(str(i), text[:-1], text[1:], np.ones(len(text) - 1, bool)) for i, text in enumerate(texts)]
    dealt = Lanes(documents, lanes, config.segment, seed, overlap_of(config))
    segments = [next(dealt) for _ in range(6)]
    rows = [tuple(field.numpy() for field in (s.tokens, s.targets, s.scored)) for s in segments]
    agreed(paper, config, rows, [s.starts.numpy() for s in segments], methods=("memory_replay",), together=True)


# All lanes at once


@over(ONE_OF_EACH)
def test_no_gradient_crosses_a_restart_of_all_lanes_and_nothing_before_it_is_seen(paper, name):
    """Two segments give, bit for bit, what they give alone, if they come after three whose predictions are not scored."""
    config, rng, _, _, model, _ = both_sides(paper, name)
    before, own = unscored(random_rows(config, rng)), random_rows(config, rng, count=2)
    for method in replay.BACKPROP:
        alone, after = (
            back_propagated(method, model, torch_segments(paper, rows, starting(*at, count=len(rows))), model.initial_state(2))
            for rows, at in ((own, [0]), ([*before, *own], [0, 3]))
        )
        assert alone.keys() == after.keys() and all(torch.equal(alone[key], after[key]) for key in alone)


@over(ONE_OF_EACH)
def test_a_restart_of_all_lanes_forgets_even_what_is_not_a_number(paper, name):
    """A carried state of NaN and infinities, as a broken step would leave it: neither value nor gradient of it is left."""
    config, rng, _, _, model, _ = both_sides(paper, name)
    [segment] = torch_segments(paper, random_rows(config, rng, count=1), starting(0, count=1))
    fresh = model.initial_state(2)
    broken = require_gradient(type(fresh)(*(field * torch.nan if field.is_floating_point() else field for field in fresh)))
    loss, _, after = replay.run_segment(model, segment, broken, 0, 1)
    loss.backward()
    expected, _, state = replay.run_segment(model, segment, fresh, 0, 1)
    assert loss == expected and all(torch.equal(a, b) for a, b in zip(after, state, strict=True))
    assert all(field.grad is None or not field.grad.any() for field in broken)


# A long document

READ = """
import sys
from pathlib import Path
import numpy as np, torch
from accelerated.data.config import DataConfig
from accelerated.data.corpus import load_corpus
from accelerated.data.tokenizers import ByteTokenizer
from accelerated.evaluation.score import carried_through, evaluate
from accelerated.models import model_class, presets_of

torch.set_num_threads(1)
tokenizer, status = ByteTokenizer(), Path("/proc/self/status")  # getrusage would count the process that started this one
common = {"vocabulary": 2, "width": 2, "heads": 1, "feed_forward": 2}
sizes = {
    "block_recurrent": {"layers": 1, "head_width": 2, "segment": 2000, "window": 400, "recurrent_layers": (1,), "states": 2},
    "compressive": {"layers": 1, "head_width": 2, "segment": 400, "memory": 20, "compressed_memory": 5},
    "memformer": {"encoder_layers": 1, "decoder_layers": 1, "head_width": 2, "segment": 400, "slots": 2, "max_distance": 1},
    "memorizing": {"layers": 1, "head_width": 2, "segment": 400, "memory_layer": 1, "memory": 800, "retrieved": 2},
    "pretrained_recurrence": {"layers": 1, "segment": 400, "max_positions": 400, "insertion_layers": (1,), "module_width": 2},
}
models = {name: model_class(name)(presets_of(name).Config(**common, **own)) for name, own in sizes.items()}
for path in sys.argv[2:]:
    documents = load_corpus(DataConfig(path), tokenizer, None, Path(sys.argv[1])).splits["test"]
    assert isinstance(documents.tokens, np.memmap)
    for name, model in models.items():
        if name in ("compressive", "pretrained_recurrence"):
            tokens = evaluate(model, documents, tokenizer, 1).tokens
        else:
            tokens = sum(segment.count_scored for segment, *_ in carried_through(model, documents, 1, predict=False))
        print(name, tokens, status.read_text().partition("VmHWM:")[2].split()[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the most memory held is read from /proc, which Linux has")
def test_a_long_document_takes_no_more_memory_than_one_of_a_tenth(tmp_path):
    """Scored by two models and read by `advance` by the others, from the mapped token cache, whose pages (a megabyte) count."""
    for size in (5_000, 50_000):
        for split, content in (("test", b"\0\1\1\0\1" * (size // 5)), ("train", b"little")):
            (tmp_path / str(size) / split).mkdir(parents=True)
            (tmp_path / str(size) / split / "book.txt").write_bytes(content)
    command = [sys.executable, "-c", READ, tmp_path / "cache", tmp_path / "5000", tmp_path / "50000"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in printed.splitlines()]
    assert [int(tokens) for _, tokens, _ in lines] == [4_999] * 5 + [49_999] * 5
    before, *peaks = [int(peak) for *_, peak in lines[4:]]
    assert max(peaks) - before < 4_000, printed  # KiB; a graph or states that are kept take more
