"""The command line of train.py: every field has an option, and presets give way to options.

What is refused for every run: paths/refusals.txt.
"""

import dataclasses
import re

import pytest

from accelerated.data.config import TaskConfig
from accelerated.data.recall import RecallConfig
from accelerated.models import NAMES, presets_of
from accelerated.training import options
from accelerated.training.checkpoint import save_checkpoint
from accelerated.training.folder import checkpoint_path
from accelerated.training.settings import (
    DataConfig,
    TrainingConfig,
    preset_settings,
    settings_contents,
)
from tests.helpers.programs import EMPTY_CHECKPOINT, refusal, words


def parse(argv):
    """(Settings, Start) of a line of options."""
    return options.parse(words(argv))


def chosen(argv):
    """The Settings alone."""
    return parse(argv)[0]


def refused(argv):
    """The one line that refuses options."""
    return refusal(parse, argv)


def keep(settings, run, step=1):
    """Write a checkpoint with these settings, without tensors, to a run folder."""
    run.mkdir()
    contents = EMPTY_CHECKPOINT | settings_contents(settings) | {"step": step}
    save_checkpoint(checkpoint_path(run), contents)
    return run


def names_of(config, prefix=""):
    """The options of a config's fields."""
    names = {field.name for field in dataclasses.fields(config)} - {"vocabulary"}
    return {f"--{prefix}{name}".replace("_", "-") for name in names}


ALWAYS = "--model --preset --data --data-dir --out --resume --init"


@pytest.mark.parametrize("data", ["stdlib", "recall"])
@pytest.mark.parametrize("model", NAMES)
def test_help_names_every_field_that_the_model_and_its_data_use_and_at_most_60(model, data, capsys):
    """Recall is made of bytes, so it has no options of words. Of its own it has twelve."""
    presets = presets_of(model)
    if data == "recall" and "recall" not in presets.PRESETS:
        pytest.skip("it has no preset for the recall task")
    expected = {*words(ALWAYS)} | names_of(TrainingConfig) | names_of(presets.Config)
    if getattr(presets, "TAKES_TASKS", False):
        expected |= names_of(TaskConfig, "task_")
    if data == "recall":
        expected -= {"--cutoffs", "--div-value"}
        expected |= names_of(RecallConfig, "recall_")
    else:
        expected |= names_of(DataConfig)
    with pytest.raises(SystemExit) as caught:
        parse(f"--model {model} --data {data} --help")
    assert caught.value.code == 0
    found = re.findall(r"^  (--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(found) == sorted(expected), "an option for each field of the config, and no other"
    assert len(found) <= (64 if data == "recall" else 60), "more options than one reads"


def test_options_override_presets():
    sizes = "--recurrent-layers 2,4 --layers 4 --gate=lstm --no-feedback"
    given = chosen(f"--steps 7 --learning-rate 0.5 {sizes}")
    assert (given.training.steps, given.training.learning_rate) == (7, 0.5), "the preset wins"
    config = given.model_config
    assert config.recurrent_layers == (2, 4), "several numbers of one option"
    assert (config.gate, config.feedback, config.vocabulary) == ("lstm", False, 256)
    assert chosen("--recurrent-layers none").model_config.recurrent_layers == ()


def test_data_chooses_a_preset_and_what_a_preset_reads_is_only_a_default():
    of_a_text = chosen("--model memorizing --preset recall-16 --data stdlib --tokenizer gpt2")
    assert of_a_text.data == DataConfig("stdlib", tokenizer="gpt2"), "recall reads no text's preset"
    recall = chosen("--data recall --recall-pairs 3")
    usual = preset_settings("block_recurrent", "recall")
    assert recall.recall.pairs == 3, "--recall-pairs is not taken"
    assert recall.model_config == usual.model_config, "an option of the task changes the model"


WORDS = "--model compressive --preset wikitext-103 --data stdlib"
OTHER_TOKENS = [  # (options, the DataConfig, cutoffs)
    ("", DataConfig(train_words=267_735, carry_over_documents=True), (20_000, 60_000)),
    ("--tokenizer bytes", DataConfig(carry_over_documents=True), ()),
    (
        "--train-bpe 300 --cutoffs 40",
        DataConfig(train_bpe=300, carry_over_documents=True),
        (40,),
    ),
    ("--no-carry-over-documents", DataConfig(train_words=267_735), (20_000, 60_000)),
    ("--data recall", DataConfig(data="recall"), ()),
]


@pytest.mark.parametrize("more,data,cutoffs", OTHER_TOKENS)
def test_a_given_tokenizer_replaces_the_presets_and_its_cutoffs(more, data, cutoffs):
    given = chosen(f"{WORDS} {more}")
    assert given.data == data, "a tokenizer that is given leaves the preset's: look at adjust"
    assert given.model_config.cutoffs == cutoffs, "cutoffs of the preset's words: parse_new"


def test_an_option_replaces_a_default_that_does_not_fit_it():
    adam = chosen("--optimizer adam").training
    assert (adam.optimizer, adam.weight_decay) == ("adam", 0.0), "adam has no decay: look at adjust"
    tuned = "--model pretrained_recurrence --preset wikitext-103"
    for more, epochs in (("", 2), ("--steps 9", 0), ("--epochs 3", 3)):
        assert chosen(f"{tuned} {more}").training.epochs == epochs, more


FIXED = (
    "--gate fixed",
    "--data recall",
    "--preset tiny",
    "--carry-over-documents",
    "--model compressive",
    "--batch 2",
    "--weight-decay 0.5",
    "--optimizer adafactor",
    "--seed 1",
    "--dtype float64",
)


def test_resuming_keeps_model_and_data(tmp_path):
    held = chosen("--gate lstm --steps 9")
    run = keep(held, tmp_path / "run", step=3)
    resumed, start = parse(f"--resume {run} --steps 20")
    assert resumed == held._replace(training=dataclasses.replace(held.training, steps=20)), (
        "--resume changes what no option asks for"
    )
    assert start.folder == run, "a run continues in its own folder"
    assert start.resumed.contents["step"] == 3, "it is resumed from another step"
    for argv in FIXED:
        option = argv.split()[0]
        line = refused(f"--resume {run} {argv}")
        assert f"was begun with; leave {option} out" in line
    line = refused(f"--resume {run} --out elsewhere")
    assert "continues in its own folder; leave --out out" in line


def test_resuming_needs_steps_that_are_not_done(tmp_path):
    run = keep(chosen("--steps 9"), tmp_path / "run", step=3)
    assert chosen(f"--resume {run} --steps 3").training.steps == 3, "its last report is missing"
    assert chosen(f"--resume {run} --epochs 2").training.epochs == 2, "--resume ignores --epochs"
    (run / "metrics.jsonl").write_text('{"step": 3, "final": true}\n')
    assert "is at step 3; give --steps above" in refused(f"--resume {run} --steps 3")


def kept_runs(folder):
    """Runs of a small GPT-2: on recall, on a part of joined documents, with a learned tokenizer."""
    recall = chosen("--model pretrained_recurrence --width 16 --data recall --recall-distance 8")
    joined = DataConfig(training_documents=5, carry_over_documents=True)
    larger = dataclasses.replace(recall.model_config, vocabulary=300)
    learned = recall._replace(model_config=larger, data=DataConfig(train_bpe=300))
    run = keep(recall, folder / "run")
    return (
        recall,
        run,
        keep(recall._replace(data=joined), folder / "partly"),
        keep(learned, folder / "learned"),
    )


def test_weights_of_a_run_keep_its_model_and_data(tmp_path):
    """Defaults give way to options as without --init: adam has no decay, --steps no --epochs."""
    held, run, partly, _ = kept_runs(tmp_path)
    begun, start = parse(f"--init {run} --recall-distance 9")
    assert begun.recall == dataclasses.replace(held.recall, distance=9), "--init ignores the task's"
    assert begun._replace(recall=held.recall) == held._replace(training=begun.training), (
        "--init changes more than the training"
    )
    assert begun.training == preset_settings("pretrained_recurrence", "fine-tune").training, (
        "--init trains as the preset says"
    )
    save_checkpoint(run / "best.pt", start.initial.contents | {"step": 0})
    step = parse(f"--init {run}")[1].initial.contents["step"]
    assert step == 1, "--init begins with the best weights, not the last: load_weights"
    assert start.folder.name == "pretrained_recurrence-recall-1", "a new run's name: new_folder"
    joined = DataConfig(training_documents=5, carry_over_documents=True)
    assert chosen(f"--init {partly}").data == joined, "--init reads what its run has read"
    elsewhere = DataConfig(str(tmp_path), carry_over_documents=True)
    assert chosen(f"--init {partly} --data {tmp_path}").data == elsewhere, "keeps the tokenizer"
    assert not chosen(f"--init {partly} --data recall").data.carry_over_documents, "it stays joined"
    assert chosen(f"--init {run} --optimizer adam").training.weight_decay == 0, "adam: see adjust"
    assert chosen(f"--init {run} --preset wikitext-103 --steps 5").training.epochs == 0


def test_what_does_not_go_with_the_weights_of_a_run_is_refused(tmp_path):
    _, run, partly, learned = kept_runs(tmp_path)
    for argv, said in (
        (f"{run} --heads 2", "--heads is 2, the weights of --init "),
        (f"{partly} --tokenizer bytes", "weights; leave --tokenizer and --train-... out"),
        (f"{learned} --data recall", "--data recall is made of bytes, and the weights of"),
        (f"{run} --model compressive", "a pretrained_recurrence; leave --model compressive out"),
        (f"{run}/checkpoint.pt", "/checkpoint.pt is a file; give the folder that it is in"),
    ):
        assert said in refused(f"--init {argv}"), argv


def test_a_new_run_never_takes_an_old_ones_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    keep(chosen("--data recall"), tmp_path / "runs" / "block_recurrent-recall-1")
    assert parse("--data recall")[1].folder.name == "block_recurrent-recall-2", "new_folder reuses"
    line = refused("--data recall --out runs/block_recurrent-recall-1")
    assert "already holds checkpoint.pt, and nothing is replaced; give a folder that is" in line
    assert line.endswith("new or empty, or --resume runs/block_recurrent-recall-1")


OTHERS = ["best.pt", "metrics.jsonl", "config.json", "notes.txt.writing", "tokenizer.json"]


@pytest.mark.parametrize("name", OTHERS)
def test_a_new_run_begins_in_a_folder_that_is_new_or_empty(tmp_path, name):
    """Else it would replace what stands there: of a run without its checkpoint, or of others.

    A start that was killed before its first checkpoint has left a lock, perhaps a tokenizer.
    """
    argv = f"--data recall --out {tmp_path}"
    parse(argv)
    for left in (".lock", "tokenizer.tiktoken", "checkpoint.pt.0123abcd.writing"):
        (tmp_path / left).touch()
    parse(argv)
    (tmp_path / "tokenizer.tiktoken").rename(tmp_path / name)
    if name == "tokenizer.json":
        (tmp_path / ".lock").unlink()
    assert f"already holds {name}, and nothing is replaced; give" in refused(argv)
