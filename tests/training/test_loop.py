"""The training loop: steps of train.py equal the same steps written out on the references.

Written out here: the learning rate, gathering, clipping, updates; then the validations of a run
that has finished. The references compute, in float64, with the AdamW of tests/helpers. Documents
are dealt to lanes by accelerated/data/lanes.py, which tests/data/test_lanes.py tests by itself.
"""

import contextlib
import copy
import dataclasses
import importlib
import io
import math
import re
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import train as train_script
from accelerated.data.lanes import Lanes, joined_for_lanes
from accelerated.evaluation.options import parse as parse_evaluation
from accelerated.evaluation.score import token_nats
from accelerated.models import NAMES, model_class, presets_of
from accelerated.program.errors import InputError
from accelerated.protocol import overlap_of
from accelerated.replay import BACKPROP
from accelerated.training import run as runs
from accelerated.training.checkpoint import load_checkpoint
from accelerated.training.folder import read_metrics
from eval import open_documents, open_trained_run
from reference import compressive
from reference.rollout import Segment, count_scored, rollout_backward, rollout_forward
from tests.helpers.optimizers import ADAMW, adamw, clipped, norm_of
from tests.helpers.programs import train, words
from tests.helpers.texts import BYTES, document_of_ids, show_ranks

LANES = 4
GROUP = 2  # lanes that are computed at a time
HORIZON = 2
SEED = 3
PEAK = 0.05
CLIP = 0.3
DECAY = 0.2
# Two steps of warm-up, then a cosine from the peak to 0.4 of it at step 5
RATES = [0.025, 0.05, PEAK * (0.4 + 0.6 * 0.75), PEAK * (0.4 + 0.6 * 0.25), 0.02]
STEPS = range(1, 6)
UPDATES = (1, 2, 4, 5)  # after the first two, after every second one, and after the last
TOLERANCE = 1e-9  # absolute: nearly all numbers are about 1. The worst error measured is 1e-12

RECIPE = f"--batch {LANES} --accumulate {LANES // GROUP} --horizon {HORIZON} --clip {CLIP}"
RECIPE += f" --steps 5 --warmup 2 --learning-rate {PEAK} --final-fraction 0.4"
RECIPE += f" --schedule cosine --optimizer adamw --weight-decay {DECAY}"
RECIPE += " --update-every 2 --update-every-from 2 --save-every 1 --log-every 1"
RECIPE += " --dtype float64 --sample 0 --validate-every 0 --validation-tokens 0"

# What is read

TOKENS = [*BYTES.spellings, b"ab", b"cd"]  # by their ids


def document_of(text):
    """The document of a text whose only letters are a, b, c and d: ab and cd are one token each."""
    ids = [TOKENS.index(piece) for piece in re.findall(b"ab|cd|(?s:.)", text)]
    return document_of_ids("", np.array(ids, int))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Short documents in their splits {split: [Document]}, and the options that read them."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(8)
    sizes = {"train": (9, 31, 1, 17, 26, 12, 40), "valid": (23, 7, 0, 30), "test": (5,)}
    documents = {split: [] for split in sizes}
    for split, lengths in sizes.items():
        (folder / "texts" / split).mkdir(parents=True)
        for number, length in enumerate(lengths):
            text = b"".join(rng.choice([b"ab", b"cd", b"a", b"d ", b"b", b"\n"], length))
            (folder / "texts" / split / f"{number}.txt").write_bytes(text)
            documents[split].append(document_of(text))
    (folder / "ranks").write_bytes(show_ranks(TOKENS))
    options = f"--data {folder}/texts --tokenizer {folder}/ranks"
    return SimpleNamespace(documents=documents, options=options)


def config_of(name, dropout=0.0):
    """The Config of a small model with an id for each token."""
    config = presets_of(name).TEST_CONFIG
    return dataclasses.replace(config, vocabulary=len(TOKENS), dropout=dropout)


def bytes_of(targets):
    """The bytes of text that ids spell."""
    return sum(len(TOKENS[target]) for target in targets)


# What a step must give


def updated(params, gradients, moments, rate, number):
    """(Parameters, moments) after that update; only parameters of two axes or more decay."""
    after = {}
    for decay in (DECAY, 0.0):
        group = {n: x for n, x in params.items() if (x.ndim > 1) == (decay > 0)}
        settings = {"rate": rate, "beta2": 0.99, "epsilon": 1e-8, "decay": decay}
        moved, moments = adamw(group, gradients, moments, number, ADAMW | settings)
        after |= moved
    return after, moments


def logged_of(rows, read):
    """What is logged of a step, by what the reference has computed of its two segments."""
    nats = rows["0/loss"] + rows["1/loss"]
    text = bytes_of(np.concatenate([segment.targets[segment.scored] for segment in read]))
    logged = {"loss": nats / count_scored(read), "bits_per_byte": nats / math.log(2) / text}
    for key, value in rows.items():
        if key.startswith("0/auxiliary."):
            loss = key.removeprefix("0/auxiliary.")
            logged[loss] = (value + rows[f"1/auxiliary.{loss}"]) / HORIZON
    return logged


def written_out(name, config, params, documents, seed=SEED, clear=False):
    """For each step what is logged, and the parameters and the state afterwards, all by name.

    With `clear` every segment starts a document.
    """
    reference = importlib.import_module(f"reference.{name}")
    lanes = Lanes(documents, LANES, config.segment, seed, overlap_of(config))
    state = reference.initial_state(params, config, LANES)
    moments = {}
    gathered = {}
    iterations = 0
    steps = []
    for step, rate in zip(STEPS, RATES, strict=True):
        read = []
        for segment in lanes.rollout(HORIZON):
            tokens, targets, scored, starts = (field.numpy() for field in segment[:4])
            read.append(Segment(tokens, targets, scored, starts | clear))
        rows, caches, state = rollout_forward(reference, params, config, read, state)
        gradients, _ = rollout_backward(reference, params, config, caches)
        reference.add_into(gathered, gradients)
        iterations += 1
        if step in UPDATES:
            mean = {n: x / iterations for n, x in gathered.items()}
            norm = norm_of(mean.values())
            # The task does not train a compression
            bounded = clipped(mean, CLIP, {n for n in mean if ".compression." in n})
            params, moments = updated(params, bounded, moments, rate, UPDATES.index(step) + 1)
            gathered = {}
            iterations = 0
        logged = logged_of(rows, read) | {"gradient_norm": norm, "learning_rate": rate}
        steps.append(
            SimpleNamespace(logged=logged, parameters=params, state=state._asdict(), read=read)
        )
    return steps


# What train.py does

MEANS = {  # where to look if a number is the first that is wrong
    "loss": "forward_and_backward in train.py and its divisor, log_means in training/run.py and "
    "its sums since its last line, the weights, the segments and their targets, or their state",
    "bits_per_byte": "log_means in training/run.py: bits, which are nats / log 2, are divided by "
    "the bytes of the scored tokens' text",
    "gradient_norm": "average_and_clip in training/optimization.py: how many iterations it means, "
    "and whose gradients, those of an auxiliary loss apart and once; or the gradient: which groups "
    "of lanes and segments are summed",
    "learning_rate": "learning_rate in training/optimization.py, or the step that it is asked for",
    "parameter": "the rate that the optimiser took, clipping, decay, or the optimiser, in "
    "training/optimization.py",
    "state": "the state after the step, which the next one reads: forward_and_backward in train.py",
    "weights": "which step's they are: when best.pt is saved, by note_score and save in "
    "training/run.py, and loaded for the sample, by load_best",
}
AUXILIARY = "the auxiliary loss, and the share by which a group of lanes weighs its own"
SCORED = "evaluation/score.py: what counts, how memory is carried, how by_document cuts"


def check(step, kind, found, expected, name=""):
    """Fail with one sentence unless both have the same shape and numbers."""
    found = np.asarray(found, float)
    expected = np.asarray(expected, float)
    title = f"step {step}: {kind} {name}".rstrip()
    assert found.shape == expected.shape, f"{title} has {found.shape}, expected {expected.shape}"
    differences = np.nan_to_num(np.abs(found - expected), nan=np.inf)
    if differences.max(initial=0.0) <= TOLERANCE:
        return
    at = np.unravel_index(differences.argmax(), expected.shape)
    place = f" at {[*map(int, at)]}" if at else ""
    numbers = f"is {found[at]:.10g}, expected {expected[at]:.10g}"
    others = AUXILIARY if "." in kind else SCORED
    pytest.fail(f"{title}{place} {numbers}; look at {MEANS.get(kind, others)}")


def begin(folder, name, *options, dropout=0.0):
    """A run of a small model: its folder, its log, what it printed, {step: a checkpoint}.

    Also the names of the checkpoints, in the order in which they were written.
    """
    sizes = dataclasses.asdict(config_of(name, dropout))
    del sizes["vocabulary"]
    save = runs.save_checkpoint
    kept = {}
    written = []
    printed = io.StringIO()

    def saving(path, contents):
        save(path, contents)
        written.append(path.name)
        if path.name == "checkpoint.pt":
            kept[contents["step"]] = copy.deepcopy(contents)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setitem(presets_of(name).PRESETS, "tested", sizes)
        patch.setattr(runs, "save_checkpoint", saving)
        train(f"--model {name} --preset tested", RECIPE, *options, "--out", folder)
    run = SimpleNamespace(folder=folder, kept=kept, written=written)
    run.log = read_metrics(folder)
    run.printed = printed.getvalue()
    return run


def check_steps(run, steps):
    """Hold a run to the steps that are written out, in order: the first difference is the cause."""
    logged = {record["step"]: record for record in run.log if "loss" in record}
    assert [*logged] == [*STEPS], "metrics.jsonl has a line for each step"
    assert [*run.kept] == [0, *UPDATES], "a checkpoint is written before all, and after updates"
    for number, step in zip(STEPS, steps, strict=True):
        missing = step.logged.keys() - logged[number].keys()
        assert not missing, f"step {number}: metrics.jsonl has no {missing}; look at log_means"
        for name, value in step.logged.items():
            check(number, name, logged[number][name], value)
        if number not in UPDATES:
            continue
        saved = run.kept[number]
        for group in saved["optimizer"]["param_groups"]:
            check(number, "learning_rate", group["lr"], RATES[number - 1], "of the optimiser")
        assert saved["parameters"].keys() == step.parameters.keys(), "parameters' names are saved"
        for name, value in step.parameters.items():
            check(number, "parameter", saved["parameters"][name], value, name)
        for (name, value), field in zip(step.state.items(), saved["state"], strict=True):
            check(number, "state", field, value, name)


def initial_params(name, config):
    """The weights that a reference draws from the seed."""
    reference = importlib.import_module(f"reference.{name}")
    return reference.init_params(config, np.random.default_rng(SEED))


@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_those_that_are_written_out(name, data, tmp_path, capsys, monkeypatch):
    """Warm-up, clipping, gathered gradients, lanes in groups, two segments in a rollout.

    Models take the three ways of back-propagation in turn.
    """
    monkeypatch.setattr("accelerated.program.progress.SECONDS", 0.0)
    config = config_of(name)
    steps = written_out(name, config, initial_params(name, config), data.documents["train"])
    assert any(step.read[1].starts.any() for step in steps), "a document starts inside a rollout"

    method = [*BACKPROP][NAMES.index(name) % len(BACKPROP)]
    run = begin(tmp_path / "run", name, data.options, f"--seed {SEED} --backprop {method}")
    check_steps(run, steps)
    drawn = torch.Generator().manual_seed(SEED).get_state()
    assert torch.equal(run.kept[0]["random"], drawn), "dropout does not draw by --seed: see build"
    shown = re.findall(r"(\d+\.\d+) bits/byte", capsys.readouterr().err)
    expected = [f"{step.logged['bits_per_byte']:.3f}" for step in steps]
    assert shown == expected, f"the bits per byte on screen are {shown}, expected {expected}"


def test_a_run_begins_with_the_weights_of_another(data, tmp_path):
    """--init: its weights alone; state, optimiser and schedule are new, and --seed is its own.

    Memory is replayed in the second, with auxiliary losses.
    """
    run = begin(tmp_path / "run", "compressive", data.options, f"--seed {SEED}")
    params = {name: value.numpy() for name, value in run.kept[5]["parameters"].items()}
    options = f"--init {run.folder} --seed {SEED + 1} --backprop memory_replay"
    begun = begin(tmp_path / "begun", "compressive", options)
    config = config_of("compressive")
    steps = written_out("compressive", config, params, data.documents["train"], SEED + 1)
    check_steps(begun, steps)


def test_memory_that_is_cleared_is_so_in_training_and_in_validation(data, tmp_path):
    """--clear-memory: every segment begins with the initial state."""
    config = config_of("compressive")
    documents = joined_for_lanes(LANES, data.documents["train"], SEED)
    params = initial_params("compressive", config)
    steps = written_out("compressive", config, params, documents, clear=True)
    options = f"--seed {SEED} --carry-over-documents --clear-memory"
    run = begin(tmp_path / "run", "compressive", data.options, options)
    check_steps(run, steps)
    run.documents = data.documents
    run.params = {5: steps[-1].parameters}
    expected = bits_per_byte(run, 5, clear=True)
    found = run.log[-1]["validation_bits_per_byte"]
    check(5, "validation_bits_per_byte", found, expected, "with the memory cleared")
    assert "cleared_bits_per_byte" not in run.log[-1], "a control is measured twice: see report"


# What a step calls of its model


@pytest.fixture
def calls(monkeypatch):
    """calls(name) is a list of what is called of that model from then on, and how."""

    def watch(name):
        found = []
        kind = model_class(name)
        for method in ("read", "advance"):
            original = getattr(kind, method)

            def watched(model, tokens, *given, method=method, original=original):
                [dtype] = {x.dtype for x in model.state_dict().values() if x.is_floating_point()}
                how = {"lanes": len(tokens), "training": model.training, "dtype": dtype}
                found.append(SimpleNamespace(method=method, **how))
                return original(model, tokens, *given)

            monkeypatch.setattr(kind, method, watched)
        return found

    return watch


CALLS = {  # {--backprop: what a rollout of two segments calls}
    "through_time": ["read", "read"],
    "checkpointed": ["read", "read", "read", "read"],  # each once more in the backward pass
    "memory_replay": ["advance", "read", "read"],  # the state first, then from the last segment
}


@pytest.mark.parametrize("method", CALLS)
def test_back_propagation_is_the_one_that_is_asked_for(method, data, tmp_path, calls):
    """All three give the same numbers, and so do lanes in groups; what is computed tells them."""
    found = calls("memformer")
    begin(tmp_path / "run", "memformer", data.options, f"--backprop {method} --steps 2")
    found = [call for call in found if call.training]
    assert {call.lanes for call in found} == {GROUP}, f"--accumulate: {GROUP} lanes at a time"
    expected = CALLS[method] * (LANES // GROUP) * 2
    assert [call.method for call in found] == expected, f"--backprop {method} is not what was done"


ZERO = torch.tensor(0.0)
NAN = ZERO / 0


def without_loss(model, segments, state, **_):
    """A way of back-propagation whose loss is NaN."""
    return NAN, {}, state


def set_nan(optimizer, rate):
    """Instead of a rate set a parameter."""
    optimizer.param_groups[0]["params"][0].data.view(-1)[3] = NAN


BROKEN = {  # {what becomes NaN or infinite: (function, what takes its place)}
    "loss": ("accelerated.training.optimization.BACKPROP", {"through_time": without_loss}),
    "gradient's norm": ("accelerated.training.optimization.average_and_clip", lambda *_: 1 / ZERO),
    "parameters": ("accelerated.training.optimization.set_learning_rate", set_nan),
    "layers.0.compression": ("accelerated.compressive.Layer.compression_loss", lambda *_: NAN),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_not_a_number_stops_the_run(what, data, tmp_path, monkeypatch):
    """What was saved before stays, and nothing is saved after it."""
    monkeypatch.setattr(*BROKEN[what])
    said = f"the {what} is (nan|inf) at step 1; what was saved before stays; try a lower"
    with pytest.raises(InputError, match=said):
        begin(tmp_path / "run", "compressive", data.options)
    kept = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    assert kept["step"] == 0, "a model that is not a number was saved"


def test_a_run_in_bfloat16_validates_in_bfloat16_and_then_goes_on(data, tmp_path, calls):
    """The second step computes as the first did: in bfloat16, and in training mode."""
    found = calls("compressive")
    options = "--dtype bfloat16 --validate-every 1 --steps 2"
    begin(tmp_path / "run", "compressive", data.options, options)
    types = [{call.dtype for call in found if call.training is mode} for mode in (True, False)]
    assert types[0] == {torch.bfloat16}, "a step computes in bfloat16"
    assert types[1] == {torch.bfloat16}, "a validation computes in the type of the steps"
    steps = sum(call.training for call in found) / (HORIZON * LANES // GROUP)
    assert steps == 2, f"{steps:g} of 2 steps were computed in training mode"


# A run that has finished


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A run on joined documents with dropout; by its high rate the loss goes up and down."""
    options = "--carry-over-documents --validate-every 1 --learning-rate 6 --sample 1"
    torch.set_default_dtype(torch.float64)
    folder = tmp_path_factory.mktemp("finished") / "run"
    sampled = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "train.sample", lambda run: sampled.update(copy.deepcopy(run.model.state_dict()))
        )
        patch.setattr("train.validation_score", Mock(wraps=train_script.validation_score))
        run = begin(folder, "compressive", data.options, options, dropout=0.3)
        run.scored = train_script.validation_score.call_count
    run.sampled = sampled
    run.documents = data.documents
    run.params = {}
    for step, contents in run.kept.items():
        run.params[step] = {name: x.numpy() for name, x in contents["parameters"].items()}
    run.bits = {step: bits_per_byte(run, step) for step in UPDATES}  # of the validation split
    return run


def losses(run, step, split, clear=False):
    """-log p of every prediction that counts, by the reference in one lane, without dropout."""
    config = config_of("compressive")
    params = run.params[step]
    found = []
    for document in joined_for_lanes(LANES, run.documents[split]):
        start = compressive.initial_state(params, config, 1)
        state = start
        for segment in Lanes([document], 1, config.segment):
            read = start if clear else state
            logits, state, _ = compressive.forward(params, config, segment.tokens.numpy(), read)
            nats = cross_entropy(torch.tensor(logits[0]), segment.targets[0], reduction="none")
            found.append(nats[segment.scored[0]].numpy())
    return np.concatenate(found)


def bits_per_byte(run, step, clear=False):
    """The bits of all predictions to validate on, divided by the bytes of text that they spell."""
    text = sum(bytes_of(document.targets) for document in run.documents["valid"])
    return losses(run, step, "valid", clear).sum() / math.log(2) / text


def test_each_validation_is_that_of_its_step(finished):
    """In metrics.jsonl and on screen: memory is carried over the documents, nothing is dropped."""
    validations = [line for line in finished.log if "validation_loss" in line][:-1]
    assert [line["step"] for line in validations] == [*UPDATES], "what mark_what_is_due validates"
    tokens = len(losses(finished, 5, "valid"))
    least = math.inf
    for line in validations:
        step = line["step"]
        bits = finished.bits[line["step"]]
        check(step, "validation_bits_per_byte", line["validation_bits_per_byte"], bits)
        check(
            step, "validation_loss", line["validation_loss"], losses(finished, step, "valid").mean()
        )
        verdict = "the best so far" if bits < least else f"the best was {least:.3f}"
        expected = f"validation {bits:.3f} bits per byte on {tokens} tokens; {verdict}"
        [said] = re.findall(f"^step {step}: (.*)$", finished.printed, re.MULTILINE)
        assert said == expected, f"step {step} says {said!r}, not {expected!r}: look at note_score"
        least = min(least, bits)


def test_the_best_checkpoint_is_that_of_the_lowest_validation(finished):
    best = min(finished.bits, key=finished.bits.get)
    assert best not in (1, 5), "a fault that keeps the first or the last must show: change the rate"
    first = finished.written[2:4]  # after the first validation
    assert first == ["best.pt", "checkpoint.pt"], "a kill between the two would lose the best"
    kept = load_checkpoint(finished.folder / "best.pt")
    said = f"best.pt is of step {kept['step']}, and step {best} has the lowest validation"
    assert kept["step"] == best, said
    line = f"the best was step {best}, with {finished.bits[best]:.3f} bits per byte"
    assert line in finished.printed, "the sample is of other weights: look at load_best"
    for name, value in finished.params[best].items():
        check(best, "weights", kept["parameters"][name], value, f"{name} of best.pt")
        check(best, "weights", finished.sampled[name], value, f"{name} of the sample")


def test_the_last_report_has_the_memory_carried_and_cleared(finished):
    carried = finished.bits[5]
    cleared = bits_per_byte(finished, 5, clear=True)
    assert abs(carried - cleared) > 0.01, "the memory matters to this model"
    assert finished.scored == len(UPDATES) + 1, "it measures again what the last validation has"
    last = finished.log[-1]
    assert last["final"], "the last line is not the last report's: look at log_validation"
    check(5, "validation_bits_per_byte", last["validation_bits_per_byte"], carried, "at the end")
    check(5, "cleared_bits_per_byte", last["cleared_bits_per_byte"], cleared)
    [said] = re.findall("bits per byte: (.* with the memory.*)", finished.printed)
    assert said == f"{carried:.3f} with the memory, {cleared:.3f} cleared each segment"


@pytest.mark.parametrize("split", ["train", "valid"])
def test_losses_of_joined_documents_are_those_of_each_document(finished, split):
    """What eval.py positions and view show: the losses of a document, without those between two."""
    given = f"positions {finished.folder} --split {split} --checkpoint last"
    name, options = parse_evaluation(words(given))
    run = open_documents(open_trained_run(finished.folder, name, options), options, ())
    assert not run.model.training, "a model that was loaded would drop entries"
    found = run.by_document(token_nats(run.model, run.documents, run.lane_count))
    nats = losses(finished, 5, split)
    place = 0
    for number, document in enumerate(finished.documents[split]):
        size = len(document.targets)
        check(5, "losses", found[number], nats[place : place + size], f"of document {number}")
        place += size
