"""Opening a run: what cannot work is refused before training; steps, validations, last lines."""

import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import train as training_script
from accelerated.data.lanes import Lanes
from accelerated.data.recall import RecallConfig
from accelerated.data.tasks import MultiTask
from accelerated.evaluation.score import Score
from accelerated.training import opening
from accelerated.training.options import Saved, parse
from accelerated.training.run import Run
from accelerated.training.settings import TrainingConfig
from tests.helpers.programs import COMPRESSIVE, MEMFORMER, TINY, WINDOWED, refusal, train, words
from tests.helpers.texts import documents_of, write
from tests.helpers.variants import PAPERS

# (options, steps of 2 x 2 windows): there are 5 windows, or 6 that overlap. Groups of lanes change
# no number of updates
EPOCHS = [
    ("--overlap 0 --epochs 2", 3),
    ("--overlap 0 --epochs 1.3", 2),
    ("--overlap 0 --epochs 0.1", 1),
    ("--overlap 3 --epochs 2", 3),
    ("--overlap 3 --epochs 2.4", 4),
    ("--overlap 0 --epochs 2 --accumulate 2", 3),
]


@pytest.mark.parametrize("options,steps", EPOCHS)
def test_epochs_are_the_steps_that_read_that_part_of_all_windows(options, steps, capsys):
    """A resumed run whose step is not below that is refused."""
    documents = documents_of([26, 9, 0])
    settings, start = parse(words(*WINDOWED, "--horizon 2 --batch 2", options))
    found = opening.epochs_to_steps(settings, documents, start).training
    epochs = f"{found.steps} steps read as many epochs, expected {steps}: see epochs_to_steps"
    assert (found.steps, found.epochs) == (steps, 0.0), epochs
    segments = 6 if settings.model_config.overlap else 5
    said = f"--epochs {settings.training.epochs:g} of {segments} segments in 2 x 2 a step"
    assert capsys.readouterr().out.startswith(f"{said}: {steps} step")
    start.resumed = Saved("run/checkpoint.pt", {"step": 4})
    line = refusal(opening.epochs_to_steps, settings, documents, start)
    assert re.match(f"{said} are {steps} steps?, and .* is at step 4; give more", line)


def test_the_last_lines_say_how_much_was_read_and_of_recall_what_was_right():
    data = SimpleNamespace(data=SimpleNamespace(data="recall"), recall=RecallConfig())
    run = SimpleNamespace(validation_share=0.25, settings=data)
    carried = Score(6.0, 4, 3, 4)
    cleared = Score(8.0, 4, 1, 4)
    lines = Run.last_lines(run, carried, cleared).splitlines()
    assert lines[0].endswith("cleared each segment")
    right = "right answers: 75.0% with the memory, 25.0% with it cleared"
    assert lines[1] == f"{right} (a guess 10%)", "of 4 tokens 3 are right, and 1: last_lines"
    assert lines[2] == "the memory saves 25.0% of the bits", "6 of 8 nats are left"
    first, second = Run.last_lines(run, carried, None).splitlines()
    assert first.startswith("validation on 4 tokens (25% of the split), bits per byte: ")
    assert first.endswith("; no memory is carried")
    assert second.startswith("right answers: 75.0% (a guess")


VALIDATIONS = [  # (--steps, --validate-every, the steps that are followed by a validation)
    (700, -1, [*range(70, 701, 70)]),
    (701, -1, [*range(71, 701, 71), 701]),
    (4, -1, [1, 2, 3, 4]),
    (11, 4, [4, 8, 11]),
    (11, 0, []),  # the last report alone
]


@pytest.mark.parametrize("steps,asked,expected", VALIDATIONS)
def test_a_run_validates_after_each_tenth_of_its_steps_unless_it_is_said_otherwise(
    steps, asked, expected
):
    """And after the last one; each asks for a checkpoint."""
    settings = SimpleNamespace(training=TrainingConfig(steps=steps, validate_every=asked))
    due = []
    for step in range(1, steps + 1):
        run = SimpleNamespace(settings=settings, step=step, ended=step == steps)
        run.validation_due = run.save_due = False
        Run.mark_what_is_due(run)
        if run.validation_due:
            due.append(step)
            assert run.save_due, "a validation asks for a checkpoint"
    assert due == expected, "the steps that a validation is due after: mark_what_is_due"


@pytest.mark.parametrize("every", [0, 3])
def test_what_is_due_between_updates_waits_for_the_next(every):
    """A checkpoint, and a validation with a line of the log before it."""
    training = TrainingConfig(save_every=3, validate_every=every, log_every=100)
    run = SimpleNamespace(settings=SimpleNamespace(training=training), ended=False)
    run.validation_due = run.save_due = False
    for run.step, run.since_update in ((3, 1), (4, 0)):
        Run.mark_what_is_due(run)
        assert run.save_due, "a checkpoint is written each third step, or at the next update"
        assert run.validation_due == bool(every), "a validation waits, too"
        has_line = every == 3 and run.step == 4
        assert Run.log_due(run) == has_line, "a line stands before each validation"


def test_a_signal_saves_before_it_stops():
    run = Mock(save_due=False, validation_due=False, ended=False, device=None)
    assert training_script.save_and_validate(run, None, SimpleNamespace(signal="SIGTERM"))
    assert run.save.called, "what was trained since the last checkpoint is lost"


# What is validated on


def settings_with(options):
    """The settings of a small Compressive Transformer with options."""
    return parse(words(*COMPRESSIVE, options))[0]


def validated(lengths, settings):
    """The spans of validation documents with so many predictions each.

    (Number of a document, its first prediction, the one after its last.)
    """
    documents = documents_of([length + 1 for length in lengths])
    corpus = SimpleNamespace(splits={"train": documents, "valid": documents})
    _, validation = opening.documents_of(settings, corpus)
    assert validation is not documents, "all of the split is validated on"
    return validation.spans


SPANS = [  # (options, predictions of each document, spans of all that is validated on)
    # --validation-prefix: its first tokens; the first of all is not predicted
    ("--validation-prefix 10", [29, 4], [(0, 0, 9), (1, 0, 4)]),
    # Joined: 9 of each, and the prediction between them
    ("--validation-prefix 10 --carry-over-documents --batch 2", [29, 29], [(0, 0, 9), (0, 9, 19)]),
    # As eval.py reads it: 19 tokens are two parts of a segment at the least for four lanes
    ("--carry-over-documents --batch 4", [10, 9], [(0, 0, 10), (0, 10, 20)]),
]


@pytest.mark.parametrize("options, lengths, spans", SPANS, ids=[row[0] for row in SPANS])
def test_the_beginning_of_each_document_is_validated_on(options, lengths, spans):
    """--validation-prefix; what is joined has parts of a segment at the least."""
    assert validated(lengths, settings_with(options)) == spans, "documents_of, or truncated before"


def test_a_part_of_the_validation_split_is_read_from_all_over_it():
    """As many tokens as are asked for; in several lanes each has a piece.

    However few they are, a piece has eight segments of 8 tokens, so that its memory is read. How
    lanes are grouped changes nothing; of joined documents there is a part, too.
    """
    options = "--batch 4 --validation-tokens 256"
    pieces = validated([1000], settings_with(options))
    assert [stop - start for _, start, stop in pieces] == pytest.approx([64] * 4, abs=2), (
        "a lane's piece has a fourth of the tokens: documents_of"
    )
    assert pieces[-1][2] > 800, "not the first tokens alone"
    assert validated([1000], settings_with(f"{options} --accumulate 4")) == pieces, "other pieces"
    joined = validated([1000], settings_with(f"{options} --carry-over-documents"))
    assert sum(stop - start for _, start, stop in joined) < 300, "all that is joined is read"
    [(_, start, stop)] = validated([1000], settings_with("--validation-tokens 1"))
    assert 7 * 8 < stop - start <= 8 * 8, f"{stop - start} tokens, not eight segments: documents_of"


def test_a_document_of_recall_is_validated_on_whole():
    """Its questions, which come last, need the facts. It is longer than eight segments."""
    settings = settings_with("--data recall --recall-distance 90 --validation-tokens 300")
    length = settings.recall.length
    assert length > 100
    spans = validated([length] * 9, settings)
    assert spans
    for _, start, stop in spans:
        assert (start, stop) == (0, length), "a document is cut"


def test_what_is_read_is_counted_with_its_padding_and_overlaps():
    """Of 640 tokens to predict a step reads two segments of 8 in four lanes.

    Passes are of new tokens, as --epochs counts them: of an overlap of 6 two are.
    """
    settings = settings_with("--batch 4 --horizon 2 --steps 5")
    corpus = SimpleNamespace(splits={"train": documents_of([641]), "valid": documents_of([101])})
    overlapping = settings._replace(model_config=SimpleNamespace(segment=8, overlap=6))
    for of_run, passes in ((settings, 0.5), (overlapping, 0.125)):
        said = opening.how_much_is_read(SimpleNamespace(settings=of_run, corpus=corpus))
        assert said == f"tokens: train 640, valid 100; 5 steps read 320, {passes} passes"


def test_tasks_are_drawn_by_the_seed_if_they_are_asked_for():
    """How they are drawn, and what they read: data/test_tasks.py."""
    documents = documents_of([40])
    for options, kind in (("", Lanes), ("--task-infilling 0.5", MultiTask)):
        settings, _ = parse(words(*MEMFORMER, "--seed 3", options))
        reader = opening.new_reader(settings, documents)
        assert type(reader) is kind, f"{options} is read by {reader}"
        assert reader.seed == 3, "the seed is another: new_reader"


def test_a_tokenizer_is_learned_from_the_documents_that_are_read(tmp_path):
    """Of one training document alone, "ab ab ..."; the other has other letters."""
    texts = {"train/a.txt": "ab ", "train/b.txt": "zq ", "valid/a.txt": "ab "}
    write(tmp_path, {name: 50 * text for name, text in texts.items()})
    options = f"--data {tmp_path} --training-documents 1 --train-bpe 258 --out {tmp_path}/run"
    settings, start = parse(words(*COMPRESSIVE, options))
    (tmp_path / "run").mkdir()
    assert opening.choose_tokenizer(settings, start).spellings[256:] == [b"ab", b" ab"], (
        "the other document's letters are learned too"
    )


@pytest.mark.parametrize("ours,theirs", [("overlapping", "plain"), ("plain", "overlapping")])
def test_weights_that_add_or_leave_out_recurrence_mix_no_module(ours, theirs):
    """The model keeps its own, and takes all else."""
    own = PAPERS["pretrained_recurrence"]
    model = own.model(own.variant(ours), seed=1)
    drawn = {name: x.clone() for name, x in model.state_dict().items() if "module." in name}
    given = own.model(own.variant(theirs), seed=2).state_dict()
    start = SimpleNamespace(resumed=None, initial=Saved("a run", {"parameters": given}))
    opening.load_weights_of(start, model)
    for name, found in model.state_dict().items():
        expected = drawn[name] if name in drawn else given[name]
        assert torch.equal(found, expected), f"{name} is of the other model: load_weights_of"


def test_tokens_in_a_second_are_those_read_in_the_seconds_of_the_bar():
    run = SimpleNamespace(tokens=600)
    for seconds, expected in ((4.0, 150.0), (0.0, 0.0)):
        bar = SimpleNamespace(format_dict={"elapsed": seconds})
        assert Run.tokens_per_second(run, bar) == expected, f"600 tokens in {seconds} seconds"


def test_a_refused_run_leaves_no_folder(tmp_path, monkeypatch):
    """Nor does it remove what stood there."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"small.txt": "brief " * 10, "held/other": b"kept"})
    before = sorted(tmp_path.rglob("*"))
    for folder in ("run", "held/run"):
        line = refusal(train, *TINY, f"--data small.txt --out {folder}")
        assert "the valid split has 2 tokens to predict, less than a segment" in line
    assert sorted(tmp_path.rglob("*")) == before, "a refused run changes folders: own_folder"
