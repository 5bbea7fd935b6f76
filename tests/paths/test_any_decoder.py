"""Recurrence in decoders that transformers computes: GPT-2's equals ours, others their own selves.

Their folders are written by that package's save_pretrained, with random weights.
"""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from accelerated.gpt2_weights import load_decoder, renamed
from accelerated.lab.systems.roberta import load_roberta
from accelerated.pretrained_recurrence import PretrainedRecurrence, State
from accelerated.training.checkpoint import load_weights
from accelerated.training.folder import read_settings
from accelerated.training.settings import settings_from
from reference.memformer import subtree
from reference.pretrained_recurrence import Config
from tests.helpers.comparison import LADDER, assert_agree
from tests.helpers.programs import differences, equal, evaluate, printed, refusal, saved, train
from tests.helpers.rollouts import back_propagated, random_rows, torch_segments

transformers = pytest.importorskip(
    "transformers", reason="other decoders need the package transformers: .[decoders]"
)
tokenizers = pytest.importorskip("tokenizers")  # it comes with transformers

TEXT = "She had written the first page on a wet morning, and washed it off. " * 40
SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 24}
INNER = {"intermediate_size": 48}
GROUPED = {"num_key_value_heads": 2}
NARROW = {"ffn_dim": 48, "word_embed_proj_dim": 16, "layerdrop": 0.9}
DECODERS = {
    "gpt2": transformers.GPT2Config(**SIZES),
    "llama": transformers.LlamaConfig(**SIZES, **INNER, **GROUPED, tie_word_embeddings=False),
    "neox": transformers.GPTNeoXConfig(**SIZES, **INNER),
    "opt": transformers.OPTConfig(**SIZES, **NARROW),
    "mistral": transformers.MistralConfig(**SIZES, **INNER, **GROUPED, sliding_window=4),
    "bert": transformers.BertConfig(**SIZES, **INNER),  # its tokens see later ones
    "capped": transformers.Gemma2Config(**SIZES, **INNER, head_dim=8, final_logit_softcapping=1.0),
    "roberta": transformers.RobertaConfig(**SIZES, **INNER),  # of accelerated.lab
}
OTHERS = ("llama", "neox", "opt", "mistral")
WINDOWS = "--segment 12 --module-width 16 --batch 2 --horizon 2 --sample 0"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: (the package's model, the folder that it wrote)}; with a tokenizer of 290 tokens."""
    torch.set_default_dtype(torch.float32)
    learned = tokenizers.ByteLevelBPETokenizer()
    learned.train_from_iterator([TEXT], 290)
    made = {}
    for name, config in DECODERS.items():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # Biases and norms start at 0 and 1, which would hide a mistake
                parameter.add_(0.1 * torch.randn_like(parameter))
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        learned.save(str(folder / "tokenizer.json"))
        made[name] = model, folder
    headless = shutil.copytree(made["llama"][1], tmp_path_factory.mktemp("headless") / "folder")
    made["llama"][0].model.save_pretrained(headless)
    made["headless"] = None, headless
    return made


@pytest.fixture
def changed(folders, tmp_path):
    """changed(name, **fields): a copy of a folder whose config.json has other fields."""

    def copy(name, **fields):
        folder = shutil.copytree(folders[name][1], tmp_path / "folder")
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(described | fields))
        return folder

    return copy


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    return tmp_path / "book.txt"


def decoder_of(folder, **changes):
    """The model of a folder in float64 with recurrence, whose parameters are random."""
    from accelerated.any_decoder import AnyDecoder

    contents = load_decoder(folder, read_settings(folder))
    config = settings_from(contents, folder).model_config
    sizes = {"segment": 8, "vectors": 1, "module_width": 16, "dropout": 0.0} | changes
    model = AnyDecoder(dataclasses.replace(config, **sizes)).eval()
    model.load_state_dict(contents["parameters"], strict=False)
    rng = np.random.default_rng(7)
    for parameter in model.module.parameters():
        parameter.data = torch.tensor(0.3 * rng.standard_normal(parameter.shape))
    return model


VARIANTS = {
    "usual": {},
    "several vectors and layers": {"vectors": 2, "insertion_layers": (1, 3)},
    "pooled after the final norm, by attention": {
        "pool_final_norm": True,
        "pooling": "attention",
        "pool": "advance",
        "overlap": 3,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gpt2_by_transformers_is_ours(folders, variant):
    """Loss, gradients and state, by memory replay over windows; a document starts in one.

    What the insertion does to a layer of transformers is what our own layer does.
    """
    theirs = decoder_of(folders["gpt2"][1], **VARIANTS[variant])
    described = dataclasses.asdict(theirs.config)
    base = described.pop("base")
    assert json.loads(base)["model_type"] == "gpt2"
    config = Config(**described | {"feed_forward": 128})
    ours = PretrainedRecurrence(config).eval()
    parameters = renamed(theirs.decoder.state_dict(), config.layers)
    parameters["embedding"] = parameters["embedding"][:290]  # the others have no token
    ours.load_state_dict(parameters, strict=False)
    ours.module.load_state_dict(theirs.module.state_dict())

    rows = random_rows(config, np.random.default_rng(1), begins=[2])
    windows = torch_segments("pretrained_recurrence", rows)
    expected = back_propagated("memory_replay", ours, windows, ours.initial_state(2))
    found = back_propagated("memory_replay", theirs, windows, theirs.initial_state(2))

    others = {name: found[name] for name in found if not name.startswith("decoder.")}
    actual = renamed(subtree(found, "decoder."), config.layers) | others
    actual["embedding"] = actual["embedding"][:290]
    for name in [name for name in actual if name.endswith("key_bias")]:
        assert actual.pop(name).abs().max() < 1e-12, "softmax cancels it"
        expected.pop(name)
    assert_agree(expected, actual, LADDER)


@pytest.mark.parametrize("name", OTHERS)
def test_a_first_window_is_the_decoders_own(folders, name):
    """Recurrence changes later windows alone, and no token sees later ones."""
    theirs, folder = folders[name]
    model = decoder_of(folder)
    tokens = torch.randint(290, (2, 16))
    own = theirs.double()
    with torch.no_grad():
        expected = [own(part).logits[..., :290] for part in tokens.split(8, 1)]
        first, state, _ = model(tokens[:, :8], model.initial_state(2))
        second = model(tokens[:, 8:], state).logits
        shorter = model(tokens[:, 8:13], state).logits
    own.float()
    assert_agree(expected[0], first, LADDER, "logits")
    assert (second - expected[1]).abs().max() > 1e-3, "the vector changes nothing"
    assert_agree(second[:, :5], shorter, LADDER, "logits")


def test_an_inserted_vector_has_no_position_in_a_rotary_layer(folders):
    """Layer 2 of a Llama is given the vector, which an angle of 0 does not rotate, and the tokens.

    Were it rotated, logits would be those of a vector that stands somewhere.
    """
    model = decoder_of(folders["llama"][1], insertion_layers=(2,))
    state = State(torch.randn(1, 32), torch.tensor([True]))
    with torch.no_grad():
        outputs, _ = model.run_layers(torch.randint(290, (1, 8)), state)
        given = torch.cat([model.module(state.pooled), outputs[0]], 1)  # (1, 1 + 8, 32)
        cosine, sine = model.decoder.rotary_emb(given, torch.arange(8)[None])  # (1, 8, 8)
        nowhere = torch.zeros(1, 1, 8)
        angles = torch.cat([nowhere + 1, cosine], 1), torch.cat([nowhere, sine], 1)
        seen = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
        layer = model.decoder.layers[1]
        expected = layer(given, attention_mask=seen, position_embeddings=angles)[:, 1:]
    assert_agree(expected, outputs[1], LADDER, "output")


def test_such_a_run_is_trained_resumed_and_exported(folders, book, tmp_path, capsys):
    """A resumed run equals an unbroken one to the bit; OPT's own layerdrop of 0.9 is off."""
    whole, run, exported, more = (tmp_path / name for name in ("whole", "run", "exported", "more"))
    begun = f"--init {folders['opt'][1]} --data {book} {WINDOWS} --save-every 1"
    train(begun, f"--steps 4 --out {whole}")
    train(begun, f"--steps 2 --out {run}")
    train(f"--resume {run} --steps 4")
    assert not differences(whole, run, with_log=False)
    printed(capsys, "export", run, exported)
    train(WINDOWS, f"--init {exported} --steps 0 --out {more}")
    assert equal(saved(more)["parameters"], saved(whole)["parameters"])


@pytest.mark.parametrize("name", ["gpt2", *OTHERS])
def test_dropout_and_the_modules_first_weights_are_those_of_the_run(folders, name):
    """GPT-2's own rates are 0.1: with --dropout 0 nothing may be dropped, with 0.5 much must be.

    Llama's and others' are 0, and have other names.
    """
    from accelerated.any_decoder import AnyDecoder

    config = decoder_of(folders[name][1]).config
    tokens = torch.randint(290, (1, 8))
    for rate in (0.0, 0.5):
        model = AnyDecoder(dataclasses.replace(config, dropout=rate)).train()
        first, second = (model(tokens, model.initial_state(1)).logits for _ in range(2))
        assert torch.equal(first, second) == (rate == 0)
    drawn = [AnyDecoder(config, seed).module.inserted for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


LISTED = Path(__file__).with_name("decoders.txt").read_text("utf-8")
REFUSED = [line.split(" => ") for line in LISTED.splitlines() if line[0] != "#"]


@pytest.mark.parametrize("row, message", REFUSED)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(changed, row, message):
    """Each is a row of decoders.txt."""
    head, brace, fields = row.partition("{")
    name, *damaged = head.split()
    folder = changed(name, **json.loads(brace + fields or "{}"))
    for file in damaged:
        file, _, content = file.partition("=")
        (folder / file).write_text(content) if content else (folder / file).unlink()
    load = partial(load_roberta, recurrent=True, seed=0) if name == "roberta" else load_weights
    assert message in refusal(load, folder)


@pytest.mark.parametrize("mistaken", ["package_config", "with_vectors", "fields_of"])
def test_a_mistake_of_ours_is_not_blamed_on_the_folder(folders, monkeypatch, mistaken):
    """It keeps its traceback."""
    from accelerated import any_decoder

    monkeypatch.setattr(any_decoder, mistaken, Mock(side_effect=AttributeError("of ours")))
    with pytest.raises(AttributeError, match="of ours"):
        load_weights(folders["llama"][1])


def test_weights_that_are_no_plain_floats_are_refused(changed):
    """The package would convert them, and train what they are not."""
    safetensors = pytest.importorskip("safetensors.torch")
    file = changed("llama") / "model.safetensors"
    tensors = safetensors.load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    safetensors.save_file(tensors | {name: tensors[name].to(torch.int8)}, file)
    assert f"{name} is stored as " in refusal(load_weights, file.parent)


WRONG_BASES = {  # {what a run says of its decoder: a part of the message}
    "{": "",
    # However its name is written
    '{"model_type": "gpt2", "\\u005fattn_implementation": "a/b"}': "names kernels of its own",
}


@pytest.mark.parametrize("base", WRONG_BASES)
def test_a_decoder_that_a_run_describes_wrongly_is_refused_in_one_line(folders, base):
    from accelerated.any_decoder import AnyDecoder

    config = dataclasses.replace(decoder_of(folders["llama"][1]).config, base=base)
    line = refusal(AnyDecoder, config)
    assert "this decoder cannot be made: " in line
    assert WRONG_BASES[base] in line


def test_options_that_do_not_go_with_it_are_named(folders, book, tmp_path):
    folder = folders["llama"][1]
    begun = f"--init {folder} --data {book} --out {tmp_path}/run"
    message = "--segment 30 is longer than the position table; max_positions is 24"
    assert message in refusal(train, begun, "--segment 30")
    assert message in refusal(evaluate, f"score {folder} --data {book} --segment 30")
    assert "--checkpoint-layers is for GPT-2" in refusal(train, begun, "--checkpoint-layers")
    assert "--compile is for GPT-2" in refusal(train, begun, "--compile inductor")


def test_a_mask_of_numbers_says_the_same_as_one_of_booleans():
    """And as none, which is causal; a decoder without SDPA is given numbers."""
    from accelerated.any_decoder import with_vectors

    seen = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    numbers = torch.zeros(1, 1, 3, 3).masked_fill(~seen, -1e30)
    present = torch.tensor([True, False])
    masks = []
    for mask in (None, seen, numbers):
        given = {"hidden_states": torch.zeros(2, 3, 4), "attention_mask": mask}
        masks.append(with_vectors(given, torch.zeros(2, 1, 4), present)["attention_mask"])
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
    assert masks[0].isneginf().sum() == 2 * 3 + 3, "later tokens; the absent vector"
