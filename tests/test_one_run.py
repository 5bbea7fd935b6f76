"""One run from its first step to its export: trained, killed, resumed, evaluated, exported.

What ends it stands in place of a signal; tests/process kills processes.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from accelerated.training.folder import read_metrics
from accelerated.training.opening import open_run
from accelerated.training.options import parse
from accelerated.training.run import Run
from tests.helpers.programs import (
    COMPRESSIVE,
    ROOT,
    as_json,
    differences,
    evaluate,
    saved,
    train,
    words,
)

# Killed before step 8 is saved, it goes on from step 6: sums of two steps are pending, the log has
# later lines, a step has no update, and the best is that of step 4. Killed again before it is saved
# that step 8 was validated, it goes on from there, and validates first
OFTEN = "--steps 11 --update-every 2 --save-every 3 --log-every 7"
OFTEN += " --validate-every 4 --learning-rate 8 --warmup 40 --dropout 0.1"


class Killed(BaseException):
    """What nothing in the program catches."""


def train_until_killed(*options, validated):
    """Train until step 8 is about to be saved, before or after it was validated."""
    save = Run.save

    def saving(run):
        if run.step == 8 and run.validation_due != validated:
            raise Killed
        save(run)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Run, "save", saving)
        train(*options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of as many steps: `whole`, and `killed`, which was resumed."""
    folder = tmp_path_factory.mktemp("runs")
    whole = folder / "whole"
    killed = folder / "killed"
    book = folder / "book.txt"
    book.write_bytes((ROOT / "reference" / "memorizing.py").read_bytes()[:12_000])
    options = [*COMPRESSIVE, OFTEN, f"--data {book}"]
    train(*options, "--out", whole)
    train_until_killed(*options, "--out", killed, validated=False)
    assert saved(killed)["step"] == 6, "another step is saved than the last before it was killed"
    train_until_killed("--resume", killed, validated=True)
    assert saved(killed)["step"] == 8, "another step is saved than the last before it was killed"
    train("--resume", killed)
    return SimpleNamespace(whole=whole, killed=killed)


def test_a_killed_run_ends_bit_for_bit_where_an_undisturbed_one_ends(runs):
    """Parameters, optimiser, memory, place in the text, random numbers, log, the best."""
    bits = {}
    for line in read_metrics(runs.whole):
        if "validation_loss" in line:
            bits[line["step"]] = line["validation_bits_per_byte"]
    assert [*bits] == [4, 8, 11], "each fourth step is validated, and the last"
    assert min(bits, key=bits.get) == 4, "a best that is lost must show: change the learning rate"
    found = differences(runs.whole, runs.killed)
    assert not found, f"the resumed run has other values of {found}: look at Run.save and restore"


def test_its_score_counts_each_token_once(runs, capsys):
    """eval.py's score of the validation split, 5% of 12,000 bytes, is the one after training."""
    score = as_json(capsys, runs.killed, "--split valid --checkpoint last")
    final = read_metrics(runs.killed)[-1]
    assert score["tokens"] == score["split_tokens"] == 599, "each token of the split scored once"
    assert score["bits_per_byte"] == pytest.approx(final["validation_bits_per_byte"], rel=1e-6), (
        "eval.py scores otherwise than train.py has"
    )


def test_its_export_has_the_runs_weights(runs, tmp_path):
    from safetensors.torch import load_file  # without it the test is skipped: conftest.py

    evaluate("export", runs.killed, tmp_path / "exported", "--checkpoint last")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    parameters = saved(runs.killed)["parameters"]
    assert exported.keys() == parameters.keys(), "names of the export's parameters"
    for name, value in parameters.items():
        assert torch.equal(exported[name], value), f"{name} of the export is not the checkpoint's"


OTHERS = ["--validation-tokens 48", "--validation-prefix 99", "--clear-memory"]


@pytest.mark.parametrize("changed", ["", *OTHERS])
def test_the_best_of_another_measurement_is_no_rival(changed, runs):
    """A resumed run whose options change what a validation measures begins without a best."""
    settings, start = parse(words("--resume", runs.whole, "--steps 12", changed))
    start.resumed.contents["pending"] = (3.0, 2, 1, False)
    with open_run(settings, start) as run:
        is_kept = math.isfinite(run.best)
        pending = run.nats, run.scored, run.text_bytes
    assert pending == (3.0, 2, 1), "sums that wait for the log's next line: look at Run.restore"
    assert is_kept == (not changed), f"{changed}: the best stays, or is lost; see Run.restore"
