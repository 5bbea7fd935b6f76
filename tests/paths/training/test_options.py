"""The command line of train.py: every field has an option; a mistake is refused in one line that says what would work."""

import dataclasses
import re
from pathlib import Path

import pytest

from accelerated.data.config import TaskConfig
from accelerated.data.recall import RecallConfig
from accelerated.models import NAMES, presets_of
from accelerated.program.errors import InputError
from accelerated.training.checkpoint import save_checkpoint
from accelerated.training.folder import checkpoint_path
from accelerated.training.options import parse as parse_training
from accelerated.training.settings import DataConfig, TrainingConfig, preset_settings, settings_contents
from tests.helpers.programs import EMPTY_CHECKPOINT


def options_in_help(capsys, *argv):
    """The options that --help lists beside these."""
    with pytest.raises(SystemExit) as caught:
        parse_training([*argv, "--help"])
    assert caught.value.code == 0
    found = re.findall(r"^  (--[a-z0-9-]+)", capsys.readouterr().out, re.M)
    assert len(found) == len(set(found))
    return set(found)


@pytest.mark.parametrize("model", NAMES)
def test_help_names_every_field_that_the_model_and_its_data_use_and_at_most_60(model, capsys):
    for data, part in (("stdlib", DataConfig), ("recall", RecallConfig)):
        configs = {"": (TrainingConfig, presets_of(model).Config, *([DataConfig] if part is DataConfig else []))}
        configs |= {"recall_": [RecallConfig]} if part is RecallConfig else {}
        configs |= {"task_": [TaskConfig]} if model == "memformer" else {}
        names = {prefix + f.name for prefix, some in configs.items() for config in some for f in dataclasses.fields(config)}
        expected = {f"--{name.replace('_', '-')}" for name in names - {"vocabulary"}}
        expected |= {"--model", "--preset", "--data", "--data-dir", "--out", "--resume", "--init"}
        found = options_in_help(capsys, "--model", model, "--data", data)
        assert found == expected and len(found) <= 60, sorted(found ^ expected)


def test_options_override_presets():
    chosen, _ = parse_training(
        ["--steps", "7", "--layers", "4", "--recurrent-layers", "2,4", "--gate=lstm", "--no-feedback", "--learning-rate", "0.5"]
    )
    assert chosen.training.steps == 7 and chosen.training.learning_rate == 0.5
    assert chosen.model_config.recurrent_layers == (2, 4) and chosen.model_config.gate == "lstm"
    assert parse_training(["--recurrent-layers", "none"])[0].model_config.recurrent_layers == ()
    assert parse_training(["--preset", "paper"])[0].model_config.layers == 12
    recall = parse_training(["--data", "recall", "--recall-pairs", "3"])[0]
    assert recall.recall.pairs == 3 and recall.model_config == preset_settings("block_recurrent", "recall").model_config


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--model", "block_recurent"], "nearest: block_recurrent"),
        (["--preset", "tinny"], "nearest: tiny"),
        (["--backprop", "memory_reply"], "nearest: memory_replay"),
        (["--optimizer", "adafactr"], "nearest: adafactor"),
        (["--dtype", "float16"], "nearest: "),
        (["--schedule", "cosin"], "nearest: cosine"),
        (["--tokenizer", "byte"], "cannot read byte: .* one of bytes, mu-law"),
        (["--gate", "gru"], "gate is 'gru'"),
        (["--segment", "100"], "segment 100 is not a multiple of window 16"),
        (["--steps", "0"], "steps is 0"),
        (["--steps", "9", "--epochs", "2"], "--steps and --epochs both say how long to train; give one of them"),
        (["--epochs", "nan"], "--epochs is nan; it must be at least 0"),
        (["--learning-rate", "-1"], "--learning-rate is -1.0"),
        (["--clip", "nan"], "clip is nan"),
        (["--data", "recall", "--recall-pairs", "99"], "pairs is 99"),
        (["--model", "memformer", "--slots", "0"], "slots is 0"),
        (["--model", "pretrained_recurrence", "--overlap", "64"], r"overlap is 64; it must lie in 0..63 for segment 64"),
        (["--model", "pretrained_recurrence", "--segment", "300"], "segment 300 is longer than the position table"),
        (["--model", "pretrained_recurrence", "--insertion-layers", "5"], r"--insertion-layers \(5,\) must lie in 1..4"),
        (["--model", "memformer", "--task-span", "0"], "span is 0"),
        (["--model", "memformer", "--task-masked", "1"], "masked is 1.0"),
        (["--model", "memformer", "--task-infilling", "0.8", "--task-recall", "0.3"], "add up to more than 1"),
        (
            ["--model", "memformer", "--task-infilling", "0.3", "--task-masked", "0.001"],
            "--task-masked 0.001 of a segment of 64 tokens masks nothing; give more, or a longer --segment",
        ),
        (["--model", "memformer", "--task-infilling", "0.3", "--task-masked", "0.999"], "0.999 .* masks everything; give less"),
        (["--model", "memformer", "--encoder-layers", "0", "--task-recall", "0.1"], "decoder-only model; leave them out"),
        (["--model", "memformer", "--segment", "1", "--task-infilling", "0.5"], "--segment 1 has no parts; give --segment 2"),
        (["--documents", "folder"], "--documents is 'folder'; it must be one of files, folders"),
        (["--tokenizer", "gpt2", "--train-bpe", "300"], "--tokenizer names a tokenizer, .* learn one; give one of them"),
        (["--training-documents", "-1"], "--training-documents is -1; it must be 0 or at least 1"),
        (["--validation-tokens", "1"], "--validation-tokens is 1; it must be 0 or at least 2"),
        (["--train-bpe", "256"], "--train-bpe is 256; it must be 0 or at least 257"),
        (["--train-words", "2"], "--train-words is 2; it must be 0 or at least 3"),
        (["--tokenizer", "gpt2", "--train-words", "300"], "--tokenizer names a tokenizer, .* learn one; give one of them"),
        (["--train-bpe", "300", "--train-words", "300"], "--train-bpe and --train-words learn one; give one of them"),
        (["--model", "compressive", "--train-words", "50", "--cutoffs", "60"], "below vocabulary 50"),
        (["--optimizer", "adam", "--weight-decay", "0.1"], "--weight-decay is 0.1, and adam has none"),
        (["--compile", "fast"], "--compile is 'fast'; it must be one of none, inductor, cudagraphs"),
        (["--keep", "0"], "--keep is 0; it must be at least 1"),
        (["--learning-rate", "inf"], "must be positive and finite"),
        (["--seed", str(2**63)], r"it must be below 2\^63"),
        (["--schedule", "constant", "--final-fraction", "0.1"], "--final-fraction has no effect: --schedule constant"),
        (["--schedule", "inverse_square_root", "--final-fraction", "0.1"], "--final-fraction has no effect: --schedule inverse"),
        (["--update-every-from", "3"], "--update-every-from has no effect: --update-every is 1"),
        (["--weight-decay", "inf"], "--weight-decay is inf"),
        (["--model", "compressive", "--compression-loss", "bptt"], "--horizon 1 has none; give --horizon 2"),
        (["--model", "compressive", "--compression-rate", "3"], "--compression-rate 3 does not divide segment 64"),
        (["--model", "pretrained_recurrence", "--vectors", "0", "--pool", "all"], "--pool sets the recurrence module"),
        (["--init", ""], "--init is empty"),
        (["--out", ""], "--out is empty; give a folder or a file, or leave it out"),
        (["--resume", ""], "--resume is empty"),
        (["--init", "x", "--resume", "y"], "give one of them"),
        (["--init", "x", "--model", "memformer"], "--init x is not a run"),
        (["--data", "nowhere"], "no such file or folder"),
        (["--tokenizer", "mu-law"], "mu-law reads recordings, and --data stdlib is text; give a .ulaw or a folder of them"),
        (["--preset", "github"], "folders needs a folder of folders as --data, not stdlib; give one, or --documents files"),
    ],
)
def test_impossible_values_are_refused_in_one_line(argv, words):
    with pytest.raises(InputError, match=words) as caught:
        parse_training(argv)
    assert "\n" not in str(caught.value)


def test_a_preset_sets_recall_options():
    assert parse_training(["--model", "compressive", "--data", "recall"])[0].recall.distance == 192
    assert parse_training(["--model", "compressive", "--data", "recall", "--recall-distance", "9"])[0].recall.distance == 9


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--model", "compressive", "--gate", "lstm"], "--gate is an option of --model block_recurrent"),
        (["--memory", "64"], "--memory is an option of --model compressive or memorizing"),
        (["--slots", "4"], "--slots is an option of --model memformer"),
        (["--vectors=2"], "--vectors is an option of --model pretrained_recurrence"),
        (["--task-recall", "0.1"], "--task-recall is an option of --model memformer"),
        (["--recall-pairs", "3"], "--recall-pairs is an option of --data recall; leave it out or choose that"),
        (["--no-recall-vary-distance"], "--no-recall-vary-distance is an option of --data recall"),
        (["--model", "memformer", "--layers", "3"], " or pretrained_recurrence; leave it out or choose that\n"),
        *(
            (["--data", "recall", option, "9"], f"{option} is an option of --data with texts")
            for option in ("--tokenizer", "--train-bpe", "--train-words", "--training-documents", "--documents")
        ),
        (["--data", "recall", "--carry-over-documents"], "--carry-over-documents is an option of --data with texts"),
        (["--stepz", "3"], "did you mean --steps"),
        (["--learning_rate", "3"], "did you mean --learning-rate"),
        (["--steps", "many"], "invalid int value"),
        (["--recurrent-layers", "x"], "numbers joined by commas"),
        (["--steps"], "expected one argument"),
    ],
)
def test_unknown_options_exit_with_2_and_one_line(argv, words, capsys):
    """An option of another model, or of other data, is named."""
    with pytest.raises(SystemExit) as caught:
        parse_training(argv)
    printed = capsys.readouterr().err
    assert caught.value.code == 2 and words in printed and printed.count("\n") == 1


def test_an_option_replaces_defaults_that_do_not_fit_it(tmp_path):
    """A preset's tokenizer, decay and the like are replaced if a given option rules them out."""
    adam = parse_training(["--optimizer", "adam"])[0]
    assert (adam.training.optimizer, adam.training.weight_decay) == ("adam", 0.0)
    learned = ["--model", "compressive", "--preset", "wikitext-103", "--data", "stdlib"]
    assert parse_training(learned)[0].data == DataConfig(train_words=267_735, carry_over_documents=True)
    assert parse_training(learned)[0].model_config.cutoffs == (20_000, 60_000)
    of_bytes = parse_training([*learned, "--tokenizer", "bytes"])[0]
    assert of_bytes.data == DataConfig(carry_over_documents=True) and of_bytes.model_config.cutoffs == ()
    of_subwords = parse_training([*learned, "--train-bpe", "300", "--cutoffs", "40"])[0]
    assert of_subwords.data == DataConfig(train_bpe=300, carry_over_documents=True) and of_subwords.model_config.cutoffs == (40,)
    assert parse_training([*learned, "--no-carry-over-documents"])[0].data == DataConfig(train_words=267_735)
    assert parse_training([*learned, "--data", "recall"])[0].data == DataConfig(data="recall")
    tuned = ["--model", "pretrained_recurrence", "--preset", "wikitext-103"]
    assert [parse_training([*tuned, *more])[0].training.epochs for more in ([], ["--steps", "9"], ["--epochs", "3"])] == [2, 0, 3]
    pg19 = ["--model", "pretrained_recurrence", "--preset", "pg19", "--data"]
    assert parse_training([*pg19, "recall"])[0].data == DataConfig(data="recall")
    assert parse_training([*pg19, str(tmp_path)])[0].data.validation_tokens == 15_000, "the paper's, on other books"
    (tmp_path / "a").mkdir()
    assert parse_training(["--preset", "github", "--data", str(tmp_path)])[0].data.documents == "folders"
    named = ["--model", "memformer", "--preset", "wikitext-103", "--data", "stdlib", "--train-bpe", "300"]
    assert parse_training(named)[0].data == DataConfig(train_bpe=300)


def test_a_recording_implies_its_tokenizer(tmp_path):
    """A folder does not: it may hold text. The weights of a run keep theirs."""
    recording, learned = str(tmp_path / "a.ULAW"), ["--model", "compressive", "--preset", "wikitext-103"]
    Path(recording).touch()
    settings, _ = parse_training(["--data", recording])
    assert settings.data == DataConfig(recording, tokenizer="mu-law") and settings.model_config.vocabulary == 256
    assert parse_training([*learned, "--data", recording])[0].data.train_words == 0
    assert parse_training(["--data", str(tmp_path)])[0].data.tokenizer == "bytes"
    speech = parse_training(["--model", "compressive", "--preset", "speech", "--data", str(tmp_path)])[0]
    assert speech.data == DataConfig(str(tmp_path), tokenizer="mu-law") and speech.model_config.vocabulary == 256
    spoken = str(keep(settings, tmp_path / "spoken"))
    assert parse_training(["--init", spoken, "--data", recording])[0].data.tokenizer == "mu-law"


def test_the_vocabulary_is_the_tokenizers():
    assert parse_training(["--model", "pretrained_recurrence", "--preset", "gpt2-xl"])[0].model_config.vocabulary == 50257
    assert parse_training(["--model", "pretrained_recurrence"])[0].model_config.vocabulary == 256


def test_a_gpt2_implies_its_model_and_preset():
    chosen, start = parse_training(["--init", "some/gpt2.safetensors"])
    assert chosen == preset_settings("pretrained_recurrence", "gpt2")._replace(model_config=chosen.model_config)
    assert (chosen.model_config.layers, chosen.model_config.vocabulary, start.initial) == (12, 50257, None)
    assert parse_training(["--init", "x", "--preset", "gpt2-medium"])[0].model_config.layers == 24


def keep(settings, run, step=1):
    """Write a checkpoint with these settings, without tensors, to a run folder."""
    run.mkdir()
    save_checkpoint(checkpoint_path(run), EMPTY_CHECKPOINT | settings_contents(settings) | {"step": step})
    return run


def test_resuming_keeps_model_and_data(tmp_path):
    chosen, _ = parse_training(["--gate", "lstm", "--steps", "9"])
    run = str(keep(chosen, tmp_path / "run", step=3))
    resumed, start = parse_training(["--resume", run, "--steps", "20"])
    assert resumed == chosen._replace(training=dataclasses.replace(chosen.training, steps=20))
    assert str(start.folder) == run and start.resumed["step"] == 3
    for argv in (
        ["--gate", "fixed"],
        ["--data", "recall"],
        ["--preset", "tiny"],
        ["--batch", "2"],
        ["--weight-decay", "0.5"],
        ["--carry-over-documents"],
        ["--model", "compressive"],
    ):
        with pytest.raises(InputError, match="--resume keeps"):
            parse_training(["--resume", run, *argv])
    with pytest.raises(InputError, match="continues in its own folder; leave --out out"):
        parse_training(["--resume", run, "--out", "elsewhere"])
    assert parse_training(["--resume", run, "--steps", "3"])[0].training.steps == 3, "its last report is missing"
    assert parse_training(["--resume", run, "--epochs", "2"])[0].training.epochs == 2
    with pytest.raises(InputError, match="--epochs counts passes at the run's own --horizon; give --steps with another one"):
        parse_training(["--resume", run, "--epochs", "2", "--horizon", "2"])
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 3, "final": true}\n')
    for steps in ("2", "3"):
        with pytest.raises(InputError, match="is at step 3; give --steps above"):
            parse_training(["--resume", run, "--steps", steps])


def test_weights_of_a_run_keep_its_model_and_data(tmp_path):
    chosen, _ = parse_training(
        ["--model", "pretrained_recurrence", "--width", "16", "--data", "recall", "--recall-distance", "8"]
    )
    run = str(keep(chosen, tmp_path / "run"))
    carrying = str(keep(chosen._replace(data=DataConfig(carry_over_documents=True)), tmp_path / "carrying"))
    assert parse_training(["--init", carrying])[0].data.carry_over_documents
    assert not parse_training(["--init", carrying, "--data", "recall"])[0].data.carry_over_documents
    begun, start = parse_training(["--init", run])
    assert begun == chosen._replace(training=preset_settings("pretrained_recurrence", "fine-tune").training)
    assert start.initial["step"] == 1 and start.folder.name == "pretrained_recurrence-recall-1"
    assert parse_training(["--init", run, "--recall-distance", "9"])[0].recall.distance == 9
    assert not parse_training(["--init", run, "--no-recall-vary-distance"])[0].recall.vary_distance
    part = {"training_documents": 5, "validation_tokens": 9}
    partly = str(keep(chosen._replace(data=DataConfig(**part)), tmp_path / "partly"))
    assert parse_training(["--init", partly])[0].data == DataConfig(**part)
    assert parse_training(["--init", partly, "--data", str(tmp_path)])[0].data == DataConfig(str(tmp_path)), "other texts"
    for argv, words in (
        (["--width", "24"], "--width is 24, the weights of --init .* have 16; leave it out"),
        (["--init", carrying, "--tokenizer", "bytes"], "keeps the tokenizer of its weights; leave --tokenizer and --train-"),
        (["--model", "compressive"], "holds a pretrained_recurrence; leave --model compressive out"),
        (["--init", f"{run}/checkpoint.pt"], "is a run's checkpoint; give its folder, "),
        (["--vectors", "0", "--pooling", "max"], "--pooling sets the recurrence module, and --vectors 0 has none"),
    ):
        with pytest.raises(InputError, match=words):
            parse_training(["--init", run, *argv])


def test_a_new_run_never_takes_an_old_ones_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen, start = parse_training(["--data", "recall"])
    (tmp_path / start.folder.parent).mkdir()
    keep(chosen, tmp_path / start.folder)
    assert parse_training(["--data", "recall"])[1].folder.name == "block_recurrent-recall-2"
    with pytest.raises(InputError, match="already holds a run"):
        parse_training(["--data", "recall", "--out", str(start.folder)])
