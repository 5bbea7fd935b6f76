"""Settings: every preset is possible, has its paper's sizes, and survives a checkpoint."""

import dataclasses

import numpy as np
import pytest

from accelerated.data.config import DataConfig
from accelerated.data.corpus import fingerprint
from accelerated.data.recall import RecallConfig
from accelerated.models import NAMES, presets_of
from accelerated.program.errors import InputError
from accelerated.training.settings import (
    PREFIXES,
    by_config,
    preset_settings,
    settings_contents,
    settings_from,
)
from reference.compressive import init_params

PRESETS = {
    (model, name): preset_settings(model, name)
    for model in NAMES
    for name in presets_of(model).PRESETS
}
BLOCKS = {  # section 4, and the authors' code
    "layers": 12,
    "heads": 8,
    "head_width": 128,
    "width": 1024,
    "feed_forward": 4096,
    "recurrent_layers": (10,),
    "window": 512,
    "states": 512,
    "segment": 4096,
    "dropout": 0.05,
    "attention_scale": 1.0,
    "output_dropout": True,
    "gate": "fixed",
    "configuration": "skip",
    "buckets": 32,
    "max_distance": 128,
    "optimizer": "adafactor_momentum",
    "warmup": 1000,
    "schedule": "inverse_square_root",
    "learning_rate": 1.0,
    "steps": 500_000,
    "batch": 32,
    "clip": 0.0,
    "weight_decay": 0.0,
    "train_bpe": 32_000,
}
XL = BLOCKS | {"recurrent_layers": ()}
SEGMENTS = {  # of Memformer, sections 2.3, 3.1 and 3.4.2
    "width": 512,
    "feed_forward": 2048,
    "heads": 8,
    "head_width": 64,
    "segment": 64,
    "slots": 32,
    "dropout": 0.0,
    "positions": "simplified",
    "slot_value": "projected",
    "backprop": "memory_replay",
}
TASKS = {"task_infilling": 0.3, "task_recall": 0.1, "task_masked_only": True}
GPT2 = {  # section 5
    "segment": 300,
    "overlap": 0,
    "vectors": 1,
    "insertion_layers": (2,),
    "pooling": "mean",
    "pool": "all",
    "module_layers": 3,
    "module_width": 200,
    "dropout": 0.1,
    "horizon": 20,
    "warmup": 100,
    "schedule": "constant",
    "optimizer": "adam",
    "weight_decay": 0.0,
    "tokenizer": "gpt2",
}
FINE_TUNED = GPT2 | {
    "epochs": 2.0,
    "validate_every": 42,  # which read two million tokens
    "batch": 8,
}
OF_BLOCK_RECURRENT = {  # {preset: {option: the paper's value}}
    "paper": BLOCKS | {"data": "pg19"},
    "bytes": BLOCKS | {"train_bpe": 0},
    "large": BLOCKS | {"heads": 16, "feed_forward": 8192, "steps": 200_000, "batch": 128},
    "arxiv": BLOCKS | {"learning_rate": 0.5, "data": "stdlib"},
    "github": BLOCKS | {"steps": 250_000, "batch": 256, "learning_rate": 0.25, "data": "stdlib"},
    "xl-512": XL | {"window": 512, "segment": 512, "batch": 256},
    "xl-1024": XL | {"window": 1024, "segment": 1024, "batch": 128},
    "xl-2048": XL | {"window": 2048, "segment": 2048, "batch": 64},
}
MEMORIES = ("layers", "segment", "memory", "compressed_memory", "compression_rate")
OF_COMPRESSIVE = {  # sections 5.1 to 5.3 and 5.6; of Transformer-XL on enwik8 appendix B
    "enwik8": (24, 768, 768, 1152, 3),
    "wikitext-103": (18, 512, 512, 512, 4),
    "pg19": (36, 512, 512, 512, 2),
    "speech": (20, 768, 768, 768, 4),
    "enwik8-xl": (24, 768, 2304, 0, 3),
}
OF_AUTHORS = {
    "authors_code": True,
    "compression_loss": "attention_reconstruction_norm",
    "dropout": 0.1,
}
OF_TABLE_1 = {  # Memformer's sections 3.1 and Table 1: (layers, segment, memory, compressed, rate)
    "memformer": (12, 64, 16, 16, 4),
    "memformer-xl": (12, 64, 32, 0, 4),
    "memformer-large-xl": (16, 64, 64, 0, 4),
}
OF_MEMFORMER = {
    "wikitext-103": SEGMENTS | TASKS | {"encoder_layers": 4, "decoder_layers": 8, "horizon": 32},
    "decoder": SEGMENTS
    | {"encoder_layers": 0, "decoder_layers": 12, "horizon": 4, "task_infilling": 0.0},
}
OF_PRETRAINED_RECURRENCE = {
    "gpt2": GPT2,
    "wikitext-103": FINE_TUNED | {"data": "wikitext-103-raw"},
    "pg19": FINE_TUNED | {"data": "pg19", "training_documents": 1250, "validation_prefix": 15_000},
}
PAPERS = [  # (model, preset, {option: the paper's value})
    *(("block_recurrent", *row) for row in OF_BLOCK_RECURRENT.items()),
    *(
        ("compressive", preset, dict(zip(MEMORIES, sizes, strict=True)) | OF_AUTHORS)
        for preset, sizes in OF_COMPRESSIVE.items()
    ),
    *(
        ("compressive", preset, dict(zip(MEMORIES, sizes, strict=True)) | {"dropout": 0.0})
        for preset, sizes in OF_TABLE_1.items()
    ),
    *(("memformer", *row) for row in OF_MEMFORMER.items()),
    *(("pretrained_recurrence", *row) for row in OF_PRETRAINED_RECURRENCE.items()),
]


def option_values(settings):
    """{option: value} of Settings."""
    values = {}
    for part, prefix in PREFIXES.items():
        config = getattr(settings, part)
        values |= {prefix + field: value for field, value in vars(config).items()}
    return values


@pytest.mark.parametrize("model,preset,expected", PAPERS, ids=[" ".join(p[:2]) for p in PAPERS])
def test_presets_have_the_papers_sizes(model, preset, expected):
    found = option_values(PRESETS[model, preset])
    assert {option: found[option] for option in expected} == expected


@pytest.mark.parametrize("model", NAMES)
def test_usual_presets_validate_on_less_than_they_train_on(model):
    """Else a GPU, which replays a training step and not a validation, mostly validates."""
    settings = PRESETS[model, "tiny"]
    training = settings.training
    trained = training.steps * training.horizon * training.batch * settings.model_config.segment
    assert 0 < 10 * training.validation_tokens < trained / 3


PARAMETERS = {"memformer": 79_276_544, "memformer-xl": 66_693_632, "memformer-large-xl": 80_347_648}


@pytest.mark.parametrize("preset", PARAMETERS)
def test_memformers_baselines_have_the_parameters_of_its_table_1(preset):
    """66.69M, 80.35M and 79.29M, with GPT-2's vocabulary.

    The count is exact, because initial values are drawn for a small vocabulary.
    """
    config = PRESETS["compressive", preset].model_config
    few = dataclasses.replace(config, vocabulary=1, layers=1)
    params = init_params(few, np.random.default_rng(0))
    layer = sum(value.size for name, value in params.items() if name.startswith("layers.0."))
    found = config.layers * layer + 50_257 * config.width
    assert found == PARAMETERS[preset]
    paper = {"memformer": 79.29e6, "memformer-xl": 66.69e6, "memformer-large-xl": 80.35e6}[preset]
    assert found == pytest.approx(paper, rel=2e-4)


def test_no_preset_and_no_default_changes_unnoticed():
    """If it is meant to, put the new fingerprint here.

    And train what docs/results and README quote again.
    """
    values = [option_values(settings) for settings in PRESETS.values()]
    assert fingerprint(values) == "8913f32396003120"


@pytest.mark.parametrize("model,preset", PRESETS)
def test_each_option_of_a_preset_sets_one_field(model, preset):
    values = presets_of(model).PRESETS[preset]
    fields = by_config(model, values)
    assert sum(map(len, fields.values())) == len(values)


def test_presets_in_bfloat16_fit_several_gpus():
    """Each GPU has whole groups of lanes, and heads have widths that attention kernels take."""
    for pair, (_, config, training, *_) in PRESETS.items():
        if training.dtype == "bfloat16":
            assert training.batch % (8 * training.accumulate) == 0, pair
            head_width = getattr(config, "head_width", config.width // config.heads)
            assert head_width % 8 == 0, pair


def test_a_transformer_xl_has_as_many_rows_as_its_compressive_transformer():
    """Except on enwik8, where the paper gives it more."""
    for name in presets_of("compressive").PRESETS:
        if name.startswith("enwik8") or name.endswith("-xl"):
            continue
        settings = PRESETS["compressive", name]
        config = settings.model_config
        rows = {"memory": config.memory + config.compressed_memory, "compressed_memory": 0}
        longer = settings._replace(model_config=dataclasses.replace(config, **rows))
        assert PRESETS["compressive", f"{name}-xl"] == longer, name


def test_the_compressive_transformer_alone_carries_memory_over_documents():
    """Appendix E: trained without state resetting."""
    carrying = {pair for pair, settings in PRESETS.items() if settings.data.carry_over_documents}
    texts = ("enwik8", "wikitext-103", "pg19")
    assert carrying == {("compressive", name + xl) for name in texts for xl in ("", "-xl")}


def test_settings_survive_a_checkpoint_and_another_programs_are_refused():
    chosen = PRESETS["memformer", "wikitext-103"]
    chosen = chosen._replace(recall=RecallConfig(distance=7), data=DataConfig(data="a folder"))
    contents = settings_contents(chosen)
    assert settings_from(contents, "run") == chosen
    for change in (
        {"model": "other"},
        {"model_config": {"width": 0}},
        {"model_config": {"unknown": 1}},
        {"training": contents["training"] | {"steps": "many"}},
        {"training": contents["training"] | {"unknown": 1}},
    ):
        with pytest.raises(InputError, match=r"^run h"):
            settings_from(contents | change, "run")
