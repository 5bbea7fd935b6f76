"""Settings: every preset is possible, has its paper's sizes, and survives a checkpoint."""

from pathlib import Path

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
from tests.helpers.programs import words

PRESETS = {
    (model, name): preset_settings(model, name)
    for model in NAMES
    for name in presets_of(model).PRESETS
}
LISTED = Path(__file__).with_name("presets.txt").read_text("utf-8")
PAPERS = [line.split(": ") for line in LISTED.splitlines() if line[0] != "#"]


def option_values(settings):
    """{option: value} of Settings."""
    values = {}
    for part, prefix in PREFIXES.items():
        config = getattr(settings, part)
        values |= {prefix + field: value for field, value in vars(config).items()}
    return values


@pytest.mark.parametrize("preset, options", PAPERS, ids=[row[0] for row in PAPERS])
def test_presets_have_the_papers_sizes(preset, options):
    """Each is a row of presets.txt, whose options change nothing of the preset."""
    chosen = "--model {} --preset {}".format(*preset.split())
    found = option_values(parse(words(chosen))[0])
    expected = option_values(parse(words(chosen, options))[0])
    assert {option: found[option] for option in expected} == expected, "not what its paper says"


FINGERPRINTS = {  # of each model's presets
    "block_recurrent": "37fbb83af9fae04c",
    "compressive": "748b136694c3099d",
    "gated_deltanet": "b6b551a510a6f656",
    "memformer": "643538569aa2c8da",
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
    assert fingerprint(values) == FINGERPRINTS[model], f"presets/{model}.py, or a default"


def test_settings_survive_a_checkpoint_and_another_programs_are_refused():
    chosen = PRESETS["memformer", "wikitext-103"]
    chosen = chosen._replace(recall=RecallConfig(distance=7), data=DataConfig(data="a folder"))
    contents = settings_contents(chosen)
    assert settings_from(contents, "run") == chosen, "settings differ after they were saved"
    for change in (
        {"model": "other"},
        {"model_config": {"width": 0}},
        {"model_config": {"unknown": 1}},
        {"training": contents["training"] | {"steps": "many"}},
        {"training": contents["training"] | {"unknown": 1}},
    ):
        with pytest.raises(InputError, match=r"^run h"):
            settings_from(contents | change, "run")
