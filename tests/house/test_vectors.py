"""docs/vectors: made again they are the same. Whether they are right, other tests say."""

import json

import numpy as np
import pytest

from reference import check
from tests.tools.cases import EVERY_CASE
from tests.tools.vectors import FOLDER, case_file, inputs_of, rules


@pytest.mark.parametrize("paper,name", EVERY_CASE, ids=[" ".join(pair) for pair in EVERY_CASE])
def test_a_file_is_what_its_command_writes(paper, name):
    """It holds two document starts, padding and a state that is not empty."""
    (rows, metadata), (held, held_metadata) = case_file(paper, name), check.load(FOLDER / paper / f"{name}.safetensors")
    assert metadata == held_metadata and rows.keys() == held.keys()
    for key, row in rows.items():
        assert row.shape == held[key].shape and row.dtype == held[key].dtype and str(row.dtype) in ("float64", "int64", "bool"), (
            key
        )
        np.testing.assert_allclose(row, held[key], rtol=1e-9, atol=1e-12, err_msg=key)
        assert np.isfinite(row).all(), key
    _, state, segments = inputs_of(paper, name)
    assert [segment.starts.tolist() for segment in segments] == [[False, False, True], [False, True, False], [False] * 3]
    assert not segments[-1].scored[2, -2:].any() and all(segment.scored.any() for segment in segments)
    assert any(field.any() for field in state) or not any(field.size for field in state)


def test_every_file_is_a_case_and_together_they_are_small():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    cases = {f"{paper}/{name}.safetensors" for paper, name in EVERY_CASE}
    assert {path.relative_to(FOLDER).as_posix() for path in files} == {*cases, "rules.json"}
    assert sum(path.stat().st_size for path in files) <= 3_150_000


def test_the_rules_are_what_their_command_writes():
    assert json.loads((FOLDER / "rules.json").read_text()) == json.loads(json.dumps(rules()))
