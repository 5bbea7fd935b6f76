"""The recall task's questions can be answered only from memory."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerated.data.recall import ASK, FILLER, KEYS, VALUES, RecallConfig, RecallDocuments, recall_document
from accelerated.data.windows import SPLITS
from accelerated.training.settings import preset_settings

configs = st.builds(
    RecallConfig,
    pairs=st.integers(1, len(KEYS)),
    questions=st.integers(1, 9),
    distance=st.integers(0, 50),
    spacing=st.integers(2, 9),
)


@given(configs, st.integers(0, 99))
def test_answers_follow_from_the_opening_alone(config, seed):
    document = recall_document(config, np.random.default_rng(seed), "x")
    assert len(document.inputs) == len(document.targets) == len(document.scored) == config.length
    opening, rest = document.inputs[: 2 * config.pairs], document.inputs[2 * config.pairs :]
    pairs = dict(zip(opening[::2].tolist(), opening[1::2].tolist(), strict=True))
    assert set(pairs) == set(KEYS[: config.pairs].tolist())
    assert all(value in VALUES[KEYS.tolist().index(key)] for key, value in pairs.items()), "each key has values of its own"
    assert not set(rest.tolist()) & set(VALUES.flatten().tolist()), "no answer appears in the input after the opening"
    asked = np.flatnonzero(document.scored)
    assert len(asked) == config.questions
    for at in asked:
        assert document.inputs[at - 1] == ASK and document.targets[at] == pairs[document.inputs[at]]
    first = asked[0] - 1
    assert first - 2 * config.pairs == config.distance, "filler before the first question"
    assert set(rest[: config.distance].tolist()) <= set(FILLER.tolist())
    assert (np.diff(asked) == config.spacing).all()


def test_documents_depend_on_split_and_number_alone():
    splits = {split: RecallDocuments(RecallConfig(documents=5), split) for split in SPLITS}
    assert len(splits["train"]) == 5 and len(splits["valid"]) == 64
    same = [(splits["train"][3].inputs == RecallDocuments(RecallConfig(documents=5), "train")[3].inputs).all()]
    other = [(splits["train"][3].inputs == d.inputs).all() for d in (splits["train"][2], splits["valid"][3], splits["test"][3])]
    assert all(same) and not any(other)
    with pytest.raises(IndexError):
        splits["train"][5]
    assert len(list(RecallDocuments(RecallConfig(documents=3), "train"))) == 3


def test_values_and_keys_are_uniform():
    documents = list(RecallDocuments(RecallConfig(documents=600), "train"))
    targets = np.concatenate([d.targets[d.scored] for d in documents])
    counts = np.bincount(targets, minlength=128)[VALUES]
    assert counts.min() > 0.6 * counts.mean() and counts.max() < 1.4 * counts.mean()
    assert len(np.unique([KEYS, *VALUES.T])) == 44 and not set(FILLER.tolist()) & {
        ASK,
        *KEYS.tolist(),
        *VALUES.flatten().tolist(),
    }


def test_the_default_distance_is_beyond_reach_and_the_first_segment():
    """The reach of the preset's attention, W tokens per layer, and of one segment after the memory is cleared."""
    model = preset_settings("block_recurrent", "recall").model_config
    task = RecallConfig()
    assert task.distance > model.window * model.layers and 2 * task.pairs + task.distance >= model.segment


@pytest.mark.parametrize(
    "change", [{"pairs": 0}, {"pairs": len(KEYS) + 1}, {"questions": 0}, {"distance": -1}, {"spacing": 1}, {"documents": 0}]
)
def test_impossible_tasks_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(RecallConfig(), **change)
