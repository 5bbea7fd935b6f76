"""docs/vectors/rules.json: what a port is told in numbers that need no arithmetic is what we do."""

import json
from types import SimpleNamespace

import numpy as np

from accelerated.data.recall import RecallConfig, recall_document
from accelerated.data.windows import cut
from accelerated.training.optimization import learning_rate
from accelerated.training.settings import TrainingConfig
from reference import block_recurrent, compressive, memformer, pretrained_recurrence
from reference.variants import memformer as tasks
from reference.variants import pretrained_recurrence as pooling
from tests.tools.cases import CONFIGS, config_of
from tests.tools.vectors import FOLDER

RULES = json.loads((FOLDER / "rules.json").read_text())


def texts_of(mask):
    """A mask (N, K) as a text of 0 and 1 for each query; 1 is a key that it sees."""
    return ["".join(str(int(sees)) for sees in row) for row in mask]


def test_a_tile_of_block_recurrent_and_its_buckets():
    mask, distance, buckets = RULES["block_recurrent"].values()
    window, expected = mask.values()
    assert texts_of(block_recurrent.tile_mask(window)) == expected
    window, expected = distance.values()
    assert block_recurrent.tile_distance(window).tolist() == expected
    for rule in buckets:
        count, most, expected = rule.values()
        found = block_recurrent.position_bucket(np.arange(200), count, most)
        assert found.tolist() == expected


def test_the_mask_and_the_shift_of_compressive():
    mask, shift = RULES["compressive"].values()
    queries, keys, expected = mask.values()
    seen = compressive.causal_mask(queries, keys)
    assert texts_of(seen) == expected
    queries, keys, rows, distances = shift.values()
    assert distances == [*range(keys - 1, -1, -1)]
    by_row = np.broadcast_to(np.arange(keys), (1, 1, queries, keys))
    shifted, _ = compressive.relative_shift_forward(by_row)
    assert np.where(seen, shifted, -1)[0, 0].tolist() == rows


def test_special_tokens_and_distances_of_memformer():
    specials, distances, _ = RULES["memformer"].values()
    assert specials.keys() == {*memformer.SPECIALS}
    for name, token in specials.items():
        assert CONFIGS["memformer"].special(name) == token
    for rule in distances:
        tokens, causal, most, is_alone, signed, rows = rule.values()
        config = config_of("memformer", "decoder-only" if is_alone else "continuation")
        assert config.max_distance == most
        assert config.distances(causal).tolist() == signed
        assert memformer.distance_index(tokens, config.distances(causal)).tolist() == rows


def test_spans_that_infilling_masks():
    _, second, _ = RULES["memformer"]["tasks"]["segments"]
    for rule in RULES["memformer"]["tasks"]["of the third"]["infilling"]["spans"]:
        fraction, mean, lengths, places, reading, predicts = rule.values()
        lengths = iter(lengths)
        draws = SimpleNamespace(
            poisson=lambda _, lengths=lengths: next(lengths),
            permutation=lambda _, places=places: np.array(places),
        )
        found, masked = tasks.mask_spans(np.array(second), -1, fraction, mean, draws)
        assert found.tolist() == reading
        assert np.array(second)[masked].tolist() == predicts


def test_masks_windows_and_pooled_positions_of_gpt2():
    mask, windows, pooled = RULES["pretrained_recurrence"].values()
    present, vectors, expected = mask.values()
    masks = pretrained_recurrence.window_mask(3, vectors, np.array(present))
    assert [texts_of(mask[0]) for mask in masks] == expected
    for rule in windows:
        *given, expected = rule.values()
        assert [[*each] for each in cut(*given)] == expected
    for rule in pooled:
        window, overlap, pool, tokens, count = rule.values()
        config = pretrained_recurrence.Config(segment=window, overlap=overlap, pool=pool)
        assert pooling.pooled_rows(config, tokens) == count


def test_schedules():
    for rule in RULES["schedules"]:
        fields = dict(rule)
        rates = fields.pop("rate at step")
        config = TrainingConfig(**fields)
        assert {step: learning_rate(int(step), config) for step in rates} == rates


def test_documents_of_the_recall_task():
    fields, documents = RULES["recall task"].values()
    for number, expected in enumerate(documents):
        rng = np.random.default_rng([0, 0, number])
        document = recall_document(RecallConfig(**fields), rng, str(number))
        assert bytes(document.inputs).decode() == expected["inputs"]
        assert document.targets.tolist() == expected["targets"]
        assert document.scored.tolist() == expected["scored"]
