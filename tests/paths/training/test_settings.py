"""Settings: every field is described, every preset is possible and has its paper's sizes; old checkpoints are read."""

import dataclasses

import pytest

from accelerated.data.recall import RecallConfig
from accelerated.data.tasks import TaskConfig
from accelerated.models import NAMES, presets_of
from accelerated.program.errors import InputError
from accelerated.training.options import field_help
from accelerated.training.settings import (
    DataConfig,
    TrainingConfig,
    by_config,
    preset_settings,
    settings_contents,
    settings_from,
)

CONFIGS = [TrainingConfig, DataConfig, RecallConfig, TaskConfig, *(presets_of(name).Config for name in NAMES)]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_is_described(config):
    described = field_help(config)
    assert set(described) == {field.name for field in dataclasses.fields(config)}
    assert all(len(text) > 8 for text in described.values())


@pytest.mark.parametrize("model", NAMES)
def test_every_preset_is_possible(model):
    for preset in presets_of(model).PRESETS:
        chosen = preset_settings(model, preset)
        assert isinstance(chosen.model_config, presets_of(model).Config)
        values = by_config(model, presets_of(model).PRESETS[preset])
        assert sum(map(len, values.values())) == len(presets_of(model).PRESETS[preset]), "each option sets exactly one field"
    assert {"tiny", "small", "recall"} <= presets_of(model).PRESETS.keys()


def test_the_papers_sizes_fit_a_gpu():
    """Their settings for it, and no other preset's; on several GPUs each process still has whole groups of lanes."""
    chosen = {(model, name): preset_settings(model, name).training for model in NAMES for name in presets_of(model).PRESETS}
    ours = {pair: (t.accumulate, t.checkpoint_layers) for pair, t in chosen.items() if t.dtype == "bfloat16"}
    compressive = {"enwik8": (2, False), "wikitext-103": (4, False), "pg19": (16, True), "speech": (1, False)}
    expected = {("compressive", name + xl): values for name, values in compressive.items() for xl in ("", "-xl")}
    recurrent = {"large": 16, "github": 16} | dict.fromkeys(("paper", "bytes", "arxiv", "xl-512", "xl-1024", "xl-2048"), 2)
    expected |= {("block_recurrent", name): (groups, False) for name, groups in recurrent.items()}
    expected[("memorizing", "paper")] = (8, False)
    assert ours == expected | {("memformer", name): (1, False) for name in ("wikitext-103", "decoder")}
    for pair, t in chosen.items():
        for processes in (1, 2, 4, 8):
            assert pair not in ours or (t.batch % processes == 0 and t.batch // processes % t.accumulate == 0), pair
        assert pair in ours or (t.accumulate, t.checkpoint_layers, t.dtype) == (1, False, "float32")


def test_the_papers_sizes():
    """Section 4 of the Block-Recurrent Transformer."""
    chosen = preset_settings("block_recurrent", "paper")
    c, t = chosen.model_config, chosen.training
    assert (c.layers, c.heads, c.head_width, c.width, c.feed_forward) == (12, 8, 128, 1024, 4096)
    assert (c.window, c.states, c.segment, c.recurrent_layers, c.dropout, c.attention_scale) == (512, 512, 4096, (10,), 0.05, 1.0)
    assert (c.gate, c.configuration, c.buckets, c.max_distance) == ("fixed", "skip", 32, 128)
    assert (t.optimizer, t.schedule, t.warmup, t.learning_rate) == ("adafactor", "inverse_square_root", 1000, 1.0)
    assert (t.steps, t.batch, t.clip, t.weight_decay) == (500_000, 32, 0.0, 0.0)


def test_the_block_recurrent_papers_other_settings():
    """Section 4, 4.1, 4.2 and Tables 1 and 2: what differs from the model of PG-19's tokens, and nothing else."""
    paper = preset_settings("block_recurrent", "paper")
    config, training, data = paper.model_config, paper.training, paper.data
    expected = {
        "bytes": ({}, {}, {"train_bpe": 0}),
        "large": ({"heads": 16, "feed_forward": 8192}, {"steps": 200_000, "batch": 128, "accumulate": 16}, {}),
        "arxiv": ({}, {"learning_rate": 0.5}, {"data": "stdlib"}),
        "github": (
            {},
            {"learning_rate": 0.25, "batch": 256, "steps": 250_000, "accumulate": 16},
            {"data": "stdlib", "documents": "folders"},
        ),
        "xl-512": ({"recurrent_layers": (), "window": 512, "segment": 512}, {"batch": 256}, {}),
        "xl-1024": ({"recurrent_layers": (), "window": 1024, "segment": 1024}, {"batch": 128}, {}),
        "xl-2048": ({"recurrent_layers": (), "window": 2048, "segment": 2048}, {"batch": 64}, {}),
    }
    for name, changes in expected.items():
        chosen = preset_settings("block_recurrent", name)
        parts = [dataclasses.replace(part, **own) for part, own in zip((config, training, data), changes, strict=True)]
        assert [chosen.model_config, chosen.training, chosen.data] == parts, name
        reads = chosen.training.batch * chosen.model_config.segment
        assert reads == 32 * 4096 * {"large": 4, "github": 8}.get(name, 1), "tokens in a step"


@pytest.mark.parametrize(
    "field,value",
    [("warmup", -1), ("seed", -1), ("final_fraction", 1.5), ("batch", 0), ("horizon", 0), ("device", "tpu")],
)
def test_training_config_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        TrainingConfig(**{field: value})


@pytest.mark.parametrize(
    "preset,expected",
    [
        # sections 5.1 to 5.3: L, N, M, C, c, and the Transformer-XL's M
        ("enwik8", (24, 768, 768, 1152, 3, 2304)),
        ("wikitext-103", (18, 512, 512, 512, 4, 1024)),
        ("pg19", (36, 512, 512, 512, 2, 1024)),
    ],
)
def test_the_compressive_papers_sizes(preset, expected):
    model, longer = (preset_settings("compressive", name).model_config for name in (preset, f"{preset}-xl"))
    sizes = (model.layers, model.segment, model.memory, model.compressed_memory, model.compression_rate)
    assert (*sizes, longer.memory) == expected and longer.compressed_memory == 0
    assert dataclasses.replace(longer, memory=model.memory, compressed_memory=model.compressed_memory) == model


def test_every_compressive_preset_has_its_transformer_xl():
    """It attends to as many rows or more; in the recall presets only the compressive model can reach the pairs."""
    presets = presets_of("compressive").PRESETS
    assert {f"{name}-xl" for name in presets if not name.endswith("-xl")} == {name for name in presets if name.endswith("-xl")}
    for name in ("tiny", "small", "recall"):
        ours, longer = (preset_settings("compressive", n).model_config for n in (name, f"{name}-xl"))
        assert longer.memory == ours.memory + ours.compressed_memory and longer.compressed_memory == 0
    for name in ("recall", "recall-16"):
        chosen, longer = preset_settings("compressive", name), preset_settings("compressive", f"{name}-xl").model_config
        task, config = chosen.recall, chosen.model_config
        assert task.distance >= longer.layers * (longer.memory + longer.segment), "Transformer-XL could reach back"
        assert task.length <= config.memory + config.compression_rate * config.compressed_memory, "out of the model's reach"


def test_presets_for_a_gpu_have_heads_that_its_attention_kernels_take():
    """In bfloat16 their widths are multiples of eight."""
    presets = [preset_settings(model, name) for model in NAMES for name in presets_of(model).PRESETS]
    configs = [s.model_config for s in presets if s.training.dtype == "bfloat16"]
    assert configs and all(getattr(c, "head_width", c.width // c.heads) % 8 == 0 for c in configs)


@pytest.mark.parametrize("model", ["block_recurrent", "compressive", "memformer"])
def test_recall_16_asks_for_four_facts_16_segments_of_16_tokens_later(model):
    """Where gradient must reach back to the facts, a rollout holds a document, and nearer questions teach first."""
    settings = preset_settings(model, "recall-16")
    task, segment = settings.recall, settings.model_config.segment
    assert (task.distance, task.pairs, task.values, segment % 16) == (256, 4, 10, 0)
    if model != "compressive":
        assert task.vary_distance and settings.training.horizon * segment >= task.length


def test_memory_is_carried_over_documents_as_the_compressive_paper_says_and_in_no_other_preset():
    presets = [(model, name) for model in NAMES for name in presets_of(model).PRESETS]
    carrying = {pair for pair in presets if preset_settings(*pair).data.carry_over_documents}
    assert carrying == {("compressive", name + xl) for name in ("enwik8", "wikitext-103", "pg19") for xl in ("", "-xl")}


def test_the_memformer_papers_sizes():
    """Sections 2.3, 3.1 and 3.4.2: both models, the three tasks' shares."""
    chosen, decoder = (preset_settings("memformer", name) for name in ("wikitext-103", "decoder"))
    for c in (chosen.model_config, decoder.model_config):
        assert (c.width, c.feed_forward, c.heads, c.head_width, c.segment, c.slots) == (512, 2048, 8, 64, 64, 32)
        assert (c.dropout, c.retention, c.positions) == (0.0, 0.0, "simplified")
    assert (chosen.model_config.encoder_layers, chosen.model_config.decoder_layers) == (4, 8)
    assert (decoder.model_config.encoder_layers, decoder.model_config.decoder_layers) == (0, 12)
    assert chosen.tasks.fractions == pytest.approx((0.6, 0.3, 0.1)) and (chosen.tasks.span, chosen.tasks.masked) == (3.5, 0.3)
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
    for name, expected in (
        ("wikitext-103", {"data": "wikitext-103-raw"}),
        ("pg19", {"data": "pg19", "training_documents": 1250, "validation_tokens": 15_000}),
    ):
        tuned = preset_settings("pretrained_recurrence", name)
        assert tuned.data == dataclasses.replace(chosen.data, **expected) and tuned.model_config == c
        assert tuned.training == dataclasses.replace(t, epochs=2.0, validate_every=42)
        assert t.batch * t.horizon * c.segment * tuned.training.validate_every == pytest.approx(2e6, rel=0.01), "tokens"


def test_the_pretrained_recurrence_recall_preset_asks_in_every_window():
    """In the first five windows (without the first the task is not learned); a rollout holds a document."""
    chosen = preset_settings("pretrained_recurrence", "recall")
    task, window = chosen.recall, chosen.model_config.segment
    asked = {(2 * task.pairs + task.distance + task.spacing * i + 1) // window for i in range(task.questions)}
    assert asked == {0, 1, 2, 3, 4} and chosen.training.horizon * window >= task.length


def test_the_recall_preset_asks_at_least_eight_segments_later():
    chosen = preset_settings("memformer", "recall")
    assert chosen.recall.distance >= 8 * chosen.model_config.segment
    assert chosen.training.horizon * chosen.model_config.segment >= chosen.recall.length, "a rollout holds a document"


def test_settings_survive_a_checkpoint():
    chosen = preset_settings("memformer", "wikitext-103")
    chosen = chosen._replace(recall=RecallConfig(distance=7), data=DataConfig(data="a folder", documents="folders"))
    assert settings_from(settings_contents(chosen), "run") == chosen


@pytest.mark.parametrize("change", [{"model": "other"}, {"model_config": {"width": 0}}, {"model_config": {"unknown": 1}}])
def test_settings_of_another_program_are_refused(change):
    contents = settings_contents(preset_settings("memformer", "tiny")) | change
    with pytest.raises(InputError, match="run"):
        settings_from(contents, "run")


def test_settings_of_earlier_releases_are_read(capsys):
    """Removed fields are ignored, new fields have their defaults, and so have removed values."""
    chosen = preset_settings("block_recurrent", "recall")
    contents = settings_contents(chosen)
    contents["training_config"] |= {"compile": "aot_eager", "device": "mps", "gone": 1}
    contents["data_config"]["recall"] |= {"gone": 2}
    del contents["data_config"]["tasks"], contents["data_config"]["documents"], contents["training_config"]["log_every"]
    del contents["data_config"]["carry_over_documents"]
    assert settings_from(contents, "run") == chosen
    line = "run has settings of an earlier release, which are ignored: gone, recall_gone\n"
    assert capsys.readouterr().err == line, "one line"
    contents["training_config"]["compile"] = "unheard of"
    with pytest.raises(InputError, match="run has settings that this program cannot use: compile is 'unheard of'"):
        settings_from(contents, "run")


def test_transformer_xls_of_earlier_releases_have_its_positions():
    """Their checkpoints say nothing about positions."""
    chosen = preset_settings("compressive", "tiny-xl")
    contents = settings_contents(chosen)
    del contents["model_config"]["positions"], contents["model_config"]["max_distance"]
    assert settings_from(contents, "run") == chosen and chosen.model_config.positions == "transformer_xl"
