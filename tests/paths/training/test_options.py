"""The command line of train.py: every field has an option; a mistake is refused in one line that says what would work."""

import contextlib
import dataclasses
import io
import re
import shlex

import pytest

from accelerated.data.config import TaskConfig
from accelerated.data.recall import RecallConfig
from accelerated.models import NAMES, presets_of
from accelerated.program.errors import InputError
from accelerated.training import options
from accelerated.training.checkpoint import save_checkpoint
from accelerated.training.folder import checkpoint_path
from accelerated.training.settings import (
    NOT_NEGATIVE,
    POSITIVE,
    DataConfig,
    TrainingConfig,
    preset_settings,
    settings_contents,
)
from tests.helpers.programs import EMPTY_CHECKPOINT

REFUSED = {  # {options: words of the one line, where ... stands for any}
    "--model block_recurent": "nearest: block_recurrent",
    "--compile fast": "--compile is 'fast'; it must be one of none, inductor, cudagraphs",
    "--steps 9 --epochs 2": "--steps and --epochs both say how long to train; give one of them",
    "--initial-fraction 1.5": "--initial-fraction is 1.5; it must lie in 0..1",
    "--epochs nan": "--epochs is nan; it must be at least 0",
    "--learning-rate inf": "must be positive and finite",
    f"--seed {2**63}": "it must be below 2^63",
    "--data recall --recall-pairs 99": "--recall-pairs is 99",
    "--model pretrained_recurrence --insertion-layers 5": "--insertion-layers (5,) must lie in 1..4",
    "--model memformer --encoder-layers 0 --task-recall 0.1": "decoder-only model; leave them out",
    "--model memformer --segment 1 --task-infilling 0.5": "--segment 1 has no parts; give --segment 2",
    "--model compressive --compression-loss bptt": "--horizon 1 has none; give --horizon 2",
    "--tokenizer gpt2 --train-bpe 300": "--tokenizer names a tokenizer, ... learn it; give one of them",
    "--training-documents -1": "--training-documents is -1; it must be 0 or at least 1",
    "--train-bpe 256": "--train-bpe is 256; it must be 0 or at least 257",
    "--train-words 2": "--train-words is 2; it must be 0 or at least 3",
    "--optimizer adam --weight-decay 0.1": "--weight-decay is 0.1, and adam has none",
    "--compile cudagraphs --horizon 2": "reads all 2 of --horizon first; give --horizon 1 or --backprop memory_replay",
    "--out ''": "--out is empty; give a folder or a file, or leave it out",
    "'my book.txt' --steps 3": "unknown option my book.txt; did you mean --data 'my book.txt'? --help lists all",
    **{f"--{name.replace('_', '-')} 0": "0; it must be at least 1" for name in POSITIVE},
    **{f"--{name.replace('_', '-')} -1": "; it must be at least 0" for name in NOT_NEGATIVE},
    # An option of another model, or of other data, and what argparse refuses
    "--memory 64": "--memory is an option of --model compressive or memorizing",
    "--recall-pairs 3": "--recall-pairs is an option of --data recall; leave it out or choose that",
    **{
        f"--data recall {name} 9": f"{name} is an option of --data with texts"
        for name in ("--tokenizer", "--train-bpe")
    },
    "--recurrent-layers x": "numbers joined by commas",
}


def parse(argv):
    """(Settings, Start) of a line of options, or of a list."""
    return options.parse(
        shlex.split(argv) if isinstance(argv, str) else [str(word) for word in argv]
    )


def chosen(argv):
    """The Settings alone."""
    return parse(argv)[0]


def refused(argv):
    """The one line that refuses options, of an InputError or of the parser, which ends with code 2; "" if nothing does."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            parse(argv)
        except InputError as error:
            assert "\n" not in str(error), argv
            return str(error)
        except SystemExit as end:
            assert end.code == 2 and printed.getvalue().count("\n") == 1, argv
    return printed.getvalue()


def keep(settings, run, step=1):
    """Write a checkpoint with these settings, without tensors, to a run folder."""
    run.mkdir()
    save_checkpoint(
        checkpoint_path(run), EMPTY_CHECKPOINT | settings_contents(settings) | {"step": step}
    )
    return run


@pytest.mark.parametrize("model", NAMES)
def test_help_names_every_field_that_the_model_and_its_data_use_and_at_most_60(model, capsys):
    own = {"": (TrainingConfig, presets_of(model).Config)} | (
        {"task_": (TaskConfig,)} if model == "memformer" else {}
    )
    for data, more in (("stdlib", ("", DataConfig)), ("recall", ("recall_", RecallConfig))):
        configs = [*((prefix, config) for prefix, some in own.items() for config in some), more]
        names = {
            prefix + field.name
            for prefix, config in configs
            for field in dataclasses.fields(config)
        } - {"vocabulary"}
        names -= (
            {"cutoffs", "div_value"} if data == "recall" else set()
        )  # of words; recall is made of bytes
        expected = {f"--{name.replace('_', '-')}" for name in names}
        expected |= {"--model", "--preset", "--data", "--data-dir", "--out", "--resume", "--init"}
        with pytest.raises(SystemExit) as caught:
            parse(["--model", model, "--data", data, "--help"])
        found = re.findall(r"^  (--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE)
        assert caught.value.code == 0 and len(found) == len(expected) <= 60
        assert set(found) == expected, sorted(set(found) ^ expected)


def test_impossible_values_are_refused_in_one_line():
    for argv, words in REFUSED.items():
        assert re.search(re.escape(words).replace(r"\.\.\.", ".*"), message := refused(argv)), (
            f"{argv}: {message}"
        )


def test_options_override_presets():
    given = chosen(
        "--steps 7 --recurrent-layers 2,4 --layers 4 --gate=lstm --no-feedback --learning-rate 0.5"
    )
    assert (given.training.steps, given.training.learning_rate) == (7, 0.5)
    config = given.model_config
    assert (config.recurrent_layers, config.gate, config.feedback, config.vocabulary) == (
        (2, 4),
        "lstm",
        False,
        256,
    )
    assert chosen("--recurrent-layers none").model_config.recurrent_layers == ()
    assert chosen("--preset recall-16 --data stdlib --tokenizer gpt2").data == DataConfig(
        "stdlib", "gpt2"
    )
    recall = chosen("--data recall --recall-pairs 3")
    assert (
        recall.recall.pairs == 3
        and recall.model_config == preset_settings("block_recurrent", "recall").model_config
    )


def test_an_option_replaces_defaults_that_do_not_fit_it():
    """A preset's tokenizer, decay and the like are replaced if a given option rules them out."""
    adam = chosen("--optimizer adam").training
    assert (adam.optimizer, adam.weight_decay) == ("adam", 0.0)
    words = "--model compressive --preset wikitext-103 --data stdlib"
    for more, data, cutoffs in (
        ("", DataConfig(train_words=267_735, carry_over_documents=True), (20_000, 60_000)),
        ("--tokenizer bytes", DataConfig(carry_over_documents=True), ()),
        (
            "--train-bpe 300 --cutoffs 40",
            DataConfig(train_bpe=300, carry_over_documents=True),
            (40,),
        ),
        ("--no-carry-over-documents", DataConfig(train_words=267_735), (20_000, 60_000)),
        ("--data recall", DataConfig(data="recall"), ()),
    ):
        given = chosen(f"{words} {more}")
        assert (given.data, given.model_config.cutoffs) == (data, cutoffs), more
    tuned = "--model pretrained_recurrence --preset wikitext-103"
    assert [
        chosen(f"{tuned} {more}").training.epochs for more in ("", "--steps 9", "--epochs 3")
    ] == [2, 0, 3]


def test_resuming_keeps_model_and_data(tmp_path):
    held = chosen("--gate lstm --steps 9")
    run = keep(held, tmp_path / "run", step=3)
    resumed, start = parse(f"--resume {run} --steps 20")
    assert resumed == held._replace(training=dataclasses.replace(held.training, steps=20))
    assert start.folder == run and start.resumed["step"] == 3
    for argv in (
        *(
            "--gate fixed",
            "--data recall",
            "--preset tiny",
            "--carry-over-documents",
            "--model compressive",
        ),
        *(
            "--batch 2",
            "--weight-decay 0.5",
            "--optimizer adafactor",
            "--seed 1",
            "--dtype float64",
        ),
    ):
        assert f"was begun with; leave {argv.split()[0].replace('no-', '')} out" in refused(
            f"--resume {run} {argv}"
        ), argv
    assert "continues in its own folder; leave --out out" in refused(
        f"--resume {run} --out elsewhere"
    )
    assert chosen(f"--resume {run} --steps 3").training.steps == 3, "its last report is missing"
    assert chosen(f"--resume {run} --epochs 2").training.epochs == 2
    (run / "metrics.jsonl").write_text('{"step": 3, "final": true}\n')
    assert "is at step 3; give --steps above" in refused(f"--resume {run} --steps 3")


def test_weights_of_a_run_keep_its_model_and_data(tmp_path):
    held = chosen("--model pretrained_recurrence --width 16 --data recall --recall-distance 8")
    partly = held._replace(data=DataConfig(training_documents=5, carry_over_documents=True))
    learned = held._replace(
        model_config=dataclasses.replace(held.model_config, vocabulary=300),
        data=DataConfig(train_bpe=300),
    )
    run, partly, learned = (
        keep(settings, tmp_path / name)
        for name, settings in (("run", held), ("partly", partly), ("learned", learned))
    )
    begun, start = parse(f"--init {run} --recall-distance 9")
    assert begun.recall == dataclasses.replace(held.recall, distance=9)
    assert begun._replace(recall=held.recall) == held._replace(training=begun.training)
    assert begun.training == preset_settings("pretrained_recurrence", "fine-tune").training
    assert start.initial["step"] == 1 and start.folder.name == "pretrained_recurrence-recall-1"
    assert chosen(f"--init {partly}").data == DataConfig(
        training_documents=5, carry_over_documents=True
    )
    assert chosen(f"--init {partly} --data {tmp_path}").data == DataConfig(
        str(tmp_path), carry_over_documents=True
    )
    assert not chosen(f"--init {partly} --data recall").data.carry_over_documents
    for argv, words in (
        (f"{run} --heads 2", "--heads is 2, the weights of --init "),
        (
            f"{partly} --tokenizer bytes",
            "keeps the tokenizer of its weights; leave --tokenizer and --train-",
        ),
        (f"{learned} --data recall", "--data recall is made of bytes, and the weights of"),
        (
            f"{run} --model compressive",
            "holds a pretrained_recurrence; leave --model compressive out",
        ),
        (f"{run}/checkpoint.pt", "/checkpoint.pt/checkpoint.pt; give a folder that train.py wrote"),
    ):
        assert words in refused(f"--init {argv}"), argv


def test_a_new_run_never_takes_an_old_ones_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    keep(chosen("--data recall"), tmp_path / "runs" / "block_recurrent-recall-1")
    assert parse("--data recall")[1].folder.name == "block_recurrent-recall-2"
    assert "already holds a run" in refused("--data recall --out runs/block_recurrent-recall-1")
