"""Options: every field has one, with help; what cannot work is refused in one line that names the nearest that can."""

import dataclasses

import pytest

from accelerated.data.recall import RecallConfig
from accelerated.data.tasks import TaskConfig
from accelerated.errors import InputError
from accelerated.models import MODELS
from accelerated.training import options as settings
from accelerated.training.options import field_help, parse_training
from accelerated.training.settings import PRESETS, DataConfig, TrainingConfig, preset_settings

CONFIGS = [TrainingConfig, DataConfig, RecallConfig, TaskConfig, *(model.Config for model in MODELS.values())]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_is_described(config):
    described = field_help(config)
    assert set(described) == {field.name for field in dataclasses.fields(config)}
    assert all(len(text) > 8 for text in described.values())


def test_help_names_every_field(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_training(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    names = [
        f.name for config in (TrainingConfig, DataConfig, MODELS["block_recurrent"].Config) for f in dataclasses.fields(config)
    ]
    names = [
        *(f"--{name.replace('_', '-')}" for name in names if name != "vocabulary"),
        "--recall-pairs",
        "--out",
        "--resume",
        "--preset",
    ]
    assert not [name for name in names if name not in printed]


@pytest.mark.parametrize("model", MODELS)
def test_every_preset_is_possible(model):
    for preset in PRESETS[model]:
        chosen = preset_settings(model, preset)
        assert isinstance(chosen.model_config, MODELS[model].Config)
    assert {"tiny", "small", "recall"} <= PRESETS[model].keys()


def test_the_papers_sizes():
    """Section 4 of the Block-Recurrent Transformer."""
    chosen = preset_settings("block_recurrent", "paper")
    c, t = chosen.model_config, chosen.training
    assert (c.layers, c.heads, c.head_width, c.width, c.feed_forward) == (12, 8, 128, 1024, 4096)
    assert (c.window, c.states, c.segment, c.recurrent_layers, c.dropout, c.attention_scale) == (512, 512, 4096, (10,), 0.05, 1.0)
    assert (c.gate, c.configuration, c.buckets, c.max_distance) == ("fixed", "skip", 32, 128)
    assert (t.optimizer, t.schedule, t.warmup, t.learning_rate, t.steps, t.batch) == (
        "adafactor", "inverse_square_root", 1000, 1.0, 500_000, 32,
    )  # fmt: skip


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
        (["--tokenizer", "byte"], "nearest: bytes"),
        (["--gate", "gru"], "gate is 'gru'"),
        (["--segment", "100"], "segment 100 is not a multiple of window 16"),
        (["--steps", "0"], "steps is 0"),
        (["--learning-rate", "-1"], "--learning-rate is -1.0"),
        (["--clip", "nan"], "clip is nan"),
        (["--recall-pairs", "3"], "--recall-pairs needs --data recall"),
        (["--data", "recall", "--recall-pairs", "99"], "pairs is 99"),
        (["--model", "memformer", "--slots", "0"], "slots is 0"),
        (["--data", "recall", "--tokenizer", "gpt2"], "recall is made of bytes, --tokenizer is gpt2"),
        (["--model", "pretrained_recurrence", "--overlap", "64"], r"overlap is 64; it must lie in 0..63 for segment 64"),
        (["--model", "pretrained_recurrence", "--segment", "300"], "segment 300 is longer than the position table"),
        (["--model", "pretrained_recurrence", "--insertion-layers", "5"], r"--insertion-layers \(5,\) must lie in 1..4"),
        (["--model", "memformer", "--task-span", "0"], "span is 0"),
        (["--model", "memformer", "--task-masked", "1"], "masked is 1.0"),
        (["--model", "memformer", "--task-infilling", "0.8", "--task-recall", "0.3"], "more than 1 together"),
        (
            ["--model", "memformer", "--task-infilling", "0.3", "--task-masked", "0.001"],
            "masks nothing; give between 0.0156 and 0.984",
        ),
        (["--model", "memformer", "--task-infilling", "0.3", "--task-masked", "0.999"], "masks everything"),
        (["--model", "memformer", "--encoder-layers", "0", "--task-recall", "0.1"], "decoder-only model; leave them out"),
    ],
)
def test_impossible_values_are_refused_in_one_line(argv, words):
    with pytest.raises(InputError, match=words) as caught:
        parse_training(argv)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--stepz", "3"], "did you mean --steps"),
        (["--learning_rate", "3"], "did you mean --learning-rate"),
        (["--steps", "many"], "invalid int value"),
        (["--recurrent-layers", "x"], "numbers joined by commas"),
        (["--steps"], "expected one argument"),
    ],
)
def test_unknown_options_exit_with_2_and_one_line(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_training(argv)
    printed = capsys.readouterr().err
    assert caught.value.code == 2 and words in printed and printed.count("\n") == 1


def test_settings_survive_a_checkpoint():
    chosen, _ = parse_training(["--gate", "lstm", "--data", "recall", "--recall-distance", "7", "--recurrent-layers", "1"])
    assert settings.settings_from(settings.settings_contents(chosen), "run") == chosen


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"model_config": {"width": 0}}, {"training_config": {"steps": 3, "unknown": 1}}]
)
def test_settings_of_another_program_are_refused(change):
    contents = settings.settings_contents(parse_training([])[0]) | change
    with pytest.raises(InputError, match="run"):
        settings.settings_from(contents, "run")


def test_resuming_keeps_model_and_data():
    chosen, _ = parse_training(["--gate", "lstm", "--steps", "9"])
    resumed, _ = parse_training(["--resume", "x", "--steps", "20"], resumed=chosen)
    assert resumed == chosen._replace(training=dataclasses.replace(chosen.training, steps=20))
    for argv in (["--gate", "fixed"], ["--data", "recall"], ["--preset", "tiny"], ["--batch", "2"], ["--weight-decay", "0.5"]):
        with pytest.raises(InputError, match="--resume keeps"):
            parse_training(["--resume", "x", *argv], resumed=chosen)


@pytest.mark.parametrize(
    "field,value",
    [("warmup", -1), ("seed", -1), ("final_fraction", 1.5), ("beta2", -0.1), ("batch", 0), ("horizon", 0), ("device", "tpu")],
)
def test_training_config_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        TrainingConfig(**{field: value})


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(settings.torch.cuda, "is_available", lambda: False)
    assert settings.choose_device("auto").type == "cpu"
    with pytest.raises(InputError, match="torch finds no GPU"):
        settings.choose_device("cuda")


@pytest.mark.parametrize(
    "preset,expected",
    [
        # sections 5.1 to 5.3: L, N, M, C, c, and the Transformer-XL's M
        ("enwik8", (24, 768, 768, 1152, 3, 2304)), ("wikitext-103", (18, 512, 512, 512, 4, 1024)),
        ("pg19", (36, 512, 512, 512, 2, 1024)),
    ],
)  # fmt: skip
def test_the_compressive_papers_sizes(preset, expected):
    model, longer = (preset_settings("compressive", name).model_config for name in (preset, f"{preset}-xl"))
    sizes = (model.layers, model.segment, model.memory, model.compressed_memory, model.compression_rate)
    assert (*sizes, longer.memory) == expected and longer.compressed_memory == 0
    assert dataclasses.replace(longer, memory=model.memory, compressed_memory=model.compressed_memory) == model


def test_every_compressive_preset_has_its_transformer_xl():
    """Which attends to at least as many rows; for recall, within reach of the pairs only for the compressive model."""
    presets = PRESETS["compressive"]
    assert {f"{name}-xl" for name in presets if not name.endswith("-xl")} == {name for name in presets if name.endswith("-xl")}
    for name in ("tiny", "small", "recall"):
        ours, longer = (preset_settings("compressive", n).model_config for n in (name, f"{name}-xl"))
        assert longer.memory == ours.memory + ours.compressed_memory and longer.compressed_memory == 0
    chosen, longer = preset_settings("compressive", "recall"), preset_settings("compressive", "recall-xl").model_config
    task, config = chosen.recall, chosen.model_config
    assert task.distance >= longer.layers * (longer.memory + longer.segment), "Transformer-XL could reach back"
    assert task.length <= config.memory + config.compression_rate * config.compressed_memory, "out of the model's reach"


def test_the_memformer_papers_sizes():
    """Sections 2.3, 3.1 and 3.4.2: both models, the three tasks' shares."""
    chosen, decoder = (preset_settings("memformer", name) for name in ("wikitext-103", "decoder"))
    for c in (chosen.model_config, decoder.model_config):
        assert (c.width, c.feed_forward, c.heads, c.head_width, c.segment, c.slots) == (512, 2048, 8, 64, 64, 32)
        assert (c.dropout, c.retention, c.positions) == (0.0, 0.0, "simplified")
    assert (chosen.model_config.encoder_layers, chosen.model_config.decoder_layers) == (4, 8)
    assert (decoder.model_config.encoder_layers, decoder.model_config.decoder_layers) == (0, 12)
    assert chosen.tasks.shares == pytest.approx((0.6, 0.3, 0.1)) and (chosen.tasks.span, chosen.tasks.masked) == (3.5, 0.3)
    assert (chosen.training.horizon, decoder.training.horizon) == (32, 4)
    assert chosen.training.backprop == decoder.training.backprop == "memory_replay"


def test_the_pretrained_recurrence_papers_settings():
    """Section 5: windows of 300, 20 of them, insertion at layer 2, Adam with 100 steps of warm-up; GPT-2's tokens."""
    chosen = preset_settings("pretrained_recurrence", "gpt2")
    c, t = chosen.model_config, chosen.training
    assert (c.segment, c.overlap, c.vectors, c.insertion_layers, c.pooling, c.pool) == (300, 0, 1, (2,), "mean", "all")
    assert (c.module_layers, c.module_width, c.dropout) == (3, 200, 0.1)
    assert (t.horizon, t.warmup, t.schedule, t.optimizer, t.weight_decay) == (20, 100, "constant", "adam", 0.0)
    assert chosen.data.tokenizer == "gpt2"
    assert parse_training(["--model", "pretrained_recurrence", "--preset", "gpt2-xl"])[0].model_config.vocabulary == 50257
    assert parse_training(["--model", "pretrained_recurrence"])[0].model_config.vocabulary == 256


def test_a_gpt2_implies_its_model_and_preset():
    chosen, options = parse_training(["--init", "some/gpt2.safetensors"])
    assert chosen == preset_settings("pretrained_recurrence", "gpt2")._replace(model_config=chosen.model_config)
    assert (chosen.model_config.layers, chosen.model_config.vocabulary, options.init) == (12, 50257, "some/gpt2.safetensors")
    assert parse_training(["--init", "x", "--preset", "gpt2-medium"])[0].model_config.layers == 24
    for name in ("init", "resume"):
        with pytest.raises(InputError, match=f"--{name} is empty"):
            parse_training([f"--{name}", ""])
    for argv in (["--init", "x", "--model", "memformer"], ["--init", "x", "--resume", "y"]):
        with pytest.raises(InputError, match=r"--init x is no run|give one of them"):
            parse_training(argv)


def test_the_pretrained_recurrence_recall_preset_asks_in_every_window():
    """From the first, without which it is not learned, to the fifth; a rollout holds a document."""
    chosen = preset_settings("pretrained_recurrence", "recall")
    task, window = chosen.recall, chosen.model_config.segment
    asked = {(2 * task.pairs + task.distance + task.spacing * i + 1) // window for i in range(task.questions)}
    assert asked == {0, 1, 2, 3, 4} and chosen.training.horizon * window >= task.length


def test_the_recall_preset_asks_at_least_eight_segments_later():
    chosen = preset_settings("memformer", "recall")
    assert chosen.recall.distance >= 8 * chosen.model_config.segment
    assert chosen.training.horizon * chosen.model_config.segment >= chosen.recall.length, "a rollout holds a document"


def test_checkpoints_from_before_there_were_tasks_are_read():
    contents = settings.settings_contents(parse_training([])[0])
    del contents["data_config"]["tasks"]
    assert settings.settings_from(contents, "run").tasks == TaskConfig()


def test_recall_options_of_a_preset_hold():
    assert parse_training(["--model", "compressive", "--data", "recall"])[0].recall.distance == 192
    assert parse_training(["--model", "compressive", "--data", "recall", "--recall-distance", "9"])[0].recall.distance == 9
