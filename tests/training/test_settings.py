"""Settings: every preset is possible, has its paper's sizes, and survives a checkpoint."""

import dataclasses

import numpy as np
import pytest

from accelerated.data.config import DataConfig
from accelerated.data.recall import RecallConfig
from accelerated.data.sources import fingerprint
from accelerated.models import NAMES, presets_of
from accelerated.program.errors import InputError
from accelerated.training.options import parse
from accelerated.training.settings import (
    PREFIXES,
    preset_settings,
    settings_contents,
    settings_from,
)
from reference.compressive import init_params
from tests.helpers.programs import words

PRESETS = {
    (model, name): preset_settings(model, name)
    for model in NAMES
    for name in presets_of(model).PRESETS
}
# Section 4, and the authors' code
BLOCKS = """
    --layers 12 --head-width 128 --width 1024 --recurrent-layers 10 --window 512 --states 512
    --segment 4096 --dropout 0.05 --gate fixed --configuration skip --buckets 32 --max-distance 128
    --optimizer adafactor_momentum --warmup 1000 --schedule inverse_square_root --learning-rate 1
    --train-bpe 32000
"""
# Of Memformer, sections 2.3, 3.1 and 3.4.2
SEGMENTS = """
    --width 512 --feed-forward 2048 --heads 8 --head-width 64 --segment 64 --slots 32
    --backprop memory_replay
"""
# Section 5
GPT2 = """
    --segment 300 --overlap 0 --vectors 1 --insertion-layers 2 --pooling mean --module-layers 3
    --module-width 200 --horizon 20 --warmup 100 --schedule constant --optimizer adam
    --tokenizer gpt2
"""


def memories(layers, segment, memory, compressed_memory, rate):
    """The sizes of a Compressive Transformer."""
    sizes = f"--layers {layers} --segment {segment} --memory {memory}"
    return f"{sizes} --compressed-memory {compressed_memory} --compression-rate {rate}"


PAPERS = {  # {(model, preset): options with the paper's values, which change nothing of it}
    ("block_recurrent", "paper"): BLOCKS
    + "--heads 8 --feed-forward 4096 --steps 500000 --batch 32 --data pg19",
    ("block_recurrent", "large"): BLOCKS
    + "--heads 16 --feed-forward 8192 --steps 200000 --batch 128",
    ("block_recurrent", "xl-2048"): "--recurrent-layers none --window 2048 --segment 2048",
    # Sections 5.1 to 5.3 and 5.6; of Transformer-XL on enwik8 appendix B
    ("compressive", "enwik8"): memories(24, 768, 768, 1152, 3),
    ("compressive", "wikitext-103"): memories(18, 512, 512, 512, 4),
    ("compressive", "pg19"): memories(36, 512, 512, 512, 2),
    ("compressive", "speech"): memories(20, 768, 768, 768, 4),
    ("compressive", "enwik8-xl"): memories(24, 768, 2304, 0, 3),
    # Memformer's section 3.1 and Table 1
    ("compressive", "memformer"): memories(12, 64, 16, 16, 4),
    ("compressive", "memformer-xl"): memories(12, 64, 32, 0, 4),
    ("compressive", "memformer-large-xl"): memories(16, 64, 64, 0, 4),
    ("memformer", "wikitext-103"): SEGMENTS
    + "--encoder-layers 4 --decoder-layers 8 --horizon 32"
    + " --task-infilling 0.3 --task-recall 0.1 --task-masked-only",
    ("memformer", "decoder"): SEGMENTS + "--encoder-layers 0 --decoder-layers 12",
    ("pretrained_recurrence", "gpt2"): GPT2,
    ("pretrained_recurrence", "wikitext-103"): GPT2 + "--epochs 2 --batch 8",
}


def option_values(settings):
    """{option: value} of Settings."""
    values = {}
    for part, prefix in PREFIXES.items():
        config = getattr(settings, part)
        values |= {prefix + field: value for field, value in vars(config).items()}
    return values


@pytest.mark.parametrize("model,preset", PAPERS)
def test_presets_have_the_papers_sizes(model, preset):
    chosen = f"--model {model} --preset {preset}"
    found = option_values(parse(words(chosen))[0])
    expected = option_values(parse(words(chosen, PAPERS[model, preset]))[0])
    assert {option: found[option] for option in expected} == expected


PARAMETERS = {"memformer": 79.29e6, "memformer-xl": 66.69e6, "memformer-large-xl": 80.35e6}


@pytest.mark.parametrize("preset", PARAMETERS)
def test_memformers_baselines_have_the_parameters_of_its_table_1(preset):
    """With GPT-2's vocabulary. Initial values are drawn for one layer and a small vocabulary."""
    config = PRESETS["compressive", preset].model_config
    few = dataclasses.replace(config, vocabulary=1, layers=1)
    params = init_params(few, np.random.default_rng(0))
    layer = sum(value.size for name, value in params.items() if name.startswith("layers.0."))
    found = config.layers * layer + 50_257 * config.width
    assert found == pytest.approx(PARAMETERS[preset], rel=2e-4)


FINGERPRINTS = {  # of each model's presets
    "block_recurrent": "5f27ace1df91baee",
    "compressive": "86155af9fde4e3f8",
    "gated_deltanet": "90306bb69a6d56dc",
    "memformer": "b224f67e015d3afd",
    "memorizing": "870f6d4949864489",
    "pretrained_recurrence": "55ae700592a05e35",
}


@pytest.mark.parametrize("model", NAMES)
def test_no_preset_and_no_default_changes_unnoticed(model):
    """If it is meant to, put the new fingerprint here.

    And train what docs/results and README quote again.
    """
    assert model in FINGERPRINTS, "a paper owes a fingerprint of its presets"
    values = [option_values(settings) for (name, _), settings in PRESETS.items() if name == model]
    assert fingerprint(values) == FINGERPRINTS[model], "a preset or a default is another one"


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
