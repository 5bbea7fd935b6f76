"""The page of the memory experiment says no more than its record shows."""

import shutil

import pytest

from accelerated.lab import memory, memory_page
from tests.conftest import ROOT

ROW = "Memorizing"
OTHER = "Compressive"
AGAIN = ("overwrite", "old value", "keep")


@pytest.fixture
def record():
    """A record without runs."""
    return memory.new_record()


def stages(count, **shares):
    """What the first `count` stages taught, with these shares of right answers; the rest is 0.9."""
    told_again = [f"{name}{where}" for name in AGAIN for where in memory.TOLD_AGAIN]
    names = [*memory.TESTS, *told_again]
    right = dict.fromkeys(names, 0.9) | shares
    record = {"right": right, "seconds": [600, 60]}
    return [{"stage": stage} | record for stage in [*memory.STAGES][:count]]


def test_without_runs_nothing_is_claimed(record):
    assert memory_page.answer(record) == "No run has ended yet."


def test_a_row_is_told_of_by_the_seeds_that_ended(record):
    record["runs"][ROW] = {"0": stages(4, hold=0.2), "1": stages(2)}
    record["runs"][OTHER] = {"0": stages(3)}
    answer = memory_page.answer(record)
    assert answer == f"{ROW} waits, overwrites and finds facts among noise."
    reading = memory_page.reading(record)
    assert "So far each row has at least 1 of the 5 planned seeds." in reading
    assert OTHER not in answer + reading, "its last stage is missing"
    assert "Gated DeltaNet" not in memory_page.page(record)


def test_what_was_not_learned_is_said_and_nothing_else_is(record):
    record["runs"][ROW] = {str(seed): stages(4, near=0.3 + seed / 10) for seed in range(4)}
    assert memory_page.answer(record) == "No row does any of it."
    reading = memory_page.reading(record)
    assert "taught" not in reading and "could" not in reading
    assert f"Not right in half even at 32 tokens: {ROW} in 3 of 4 seeds." in reading


def test_who_overwrites_keeps_the_other_facts(record):
    record["runs"][ROW] = {"0": stages(4)}
    record["runs"][OTHER] = {"0": stages(4, **{"keep, later": 0.4})}
    of_row, of_other = memory_page.answer(record).split(". ")
    assert of_row == f"{ROW} holds, waits, overwrites and finds facts among noise"
    assert of_other == f"{OTHER} holds, waits and finds facts among noise."


def test_a_skill_is_there_at_first_or_its_stage_taught_it(record):
    """Who rises in it and does not keep the other facts has no skill; or rises in all else too."""
    rising = stages(4)
    rising[0] = stages(1, **{memory_page.OVERWRITE: 0.3})[0]
    rising[1] = rising[0] | {"stage": "anywhere"}
    forgetting = [each | {"right": each["right"] | {"keep, later": 0.2}} for each in rising]
    record["runs"]["Gated DeltaNet"] = {"0": stages(4)}
    record["runs"][ROW] = {"0": rising}
    record["runs"][OTHER] = {"0": forgetting}
    everywhere = {"128": 0.3, memory_page.OVERWRITE: 0.3}
    record["runs"]["Transformer-XL"] = {"0": stages(2, **everywhere) + stages(4)[2:]}
    reading = memory_page.reading(record)
    assert "Gated DeltaNet could overwrite after the first stage already." in reading
    assert f"Facts that are told again taught {ROW} to overwrite, from 30 to 90%." in reading


def test_the_simplest_machines_know_values_and_no_key(record):
    shares = memory_page.shares_of_simplest()
    last = shares["the value told last"]
    assert (last["overwrite, later"], last["old value, later"]) == (1, 0)
    assert last["keep, later"] < 0.3, "the other keys have other values, but by chance"
    most = shares["the value told most often"]
    assert 0.35 < most["hold"] < 0.5, "of four values drawn from six"
    assert "| *the value told last* |" in memory_page.table(record)


def test_the_kept_page_and_a_picture_are_written_beside_the_kept_record(tmp_path):
    """The table has the least and the most of a row's seeds."""
    kept = ROOT / "docs" / "results"
    path = tmp_path / "memory.json"
    shutil.copy(kept / path.name, path)
    memory_page.main(path)
    page = path.with_suffix(".md").read_text().split("\n")
    expected = (kept / "memory.md").read_text().split("\n")
    assert page == expected, "what makes the page has changed, or the record"
    picture = path.with_suffix(".svg").read_bytes()
    assert OTHER in picture.decode()
    memory_page.main(path)
    assert path.with_suffix(".svg").read_bytes() == picture, "it has random names or a date"
