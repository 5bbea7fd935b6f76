"""GPT-2's weights give the logits of the `transformers` package; any other file is refused in one clear line."""

import contextlib
import dataclasses
import json
import pickle
import struct
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelerated.presets.gpt2_weights import check_described, check_gpt2, load_gpt2, renamed
from accelerated.pretrained_recurrence import Config, PretrainedRecurrence
from accelerated.program.errors import InputError
from reference import pretrained_recurrence as ref
from tests.conftest import examples

safetensors = pytest.importorskip("safetensors.torch", reason="reading GPT-2 needs the extra gpt2: safetensors")

SIZES = {"vocab_size": 97, "n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 4}
CONFIG = Config(
    vocabulary=97, width=32, layers=3, heads=4, feed_forward=128, max_positions=24, segment=24, vectors=0, module_width=16
)


def gpt2_tensors():
    """Random weights under GPT-2's names and shapes, (in, out)."""
    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (97, 32), "wpe.weight": (24, 32), "ln_f.weight": (32,), "ln_f.bias": (32,)}
    for i in range(3):
        for name, (rows, columns) in {
            "attn.c_attn": (1, 3),
            "attn.c_proj": (1, 1),
            "mlp.c_fc": (1, 4),
            "mlp.c_proj": (4, 1),
        }.items():
            shapes |= {f"h.{i}.{name}.weight": (32 * rows, 32 * columns), f"h.{i}.{name}.bias": (32 * columns,)}
        shapes |= {f"h.{i}.{norm}.{kind}": (32,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
    return {name: torch.tensor(0.2 * rng.standard_normal(shape), dtype=torch.float32) for name, shape in shapes.items()}


@pytest.fixture(autouse=True)
def single_precision(double_precision):
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def file(tmp_path):
    """A GPT-2 in safetensors."""
    safetensors.save_file(gpt2_tensors(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A GPT2LMHeadModel with random weights, the folder that its own save_pretrained wrote, and tokens."""
    transformers = pytest.importorskip("transformers", reason="the comparison needs the package transformers (extra test)")
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float32)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, attn_pdrop=0.0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start at 0 and 1, which would hide a mistake
            parameter.add_(0.2 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder, safe_serialization=True)
    return model, folder, torch.randint(97, (2, 24))


def test_logits_are_those_of_transformers(published):
    """In float32, with random weights saved by that package; the NumPy reference gives the same logits too."""
    model, folder, tokens = published
    ours = PretrainedRecurrence(CONFIG).eval()
    load_gpt2(ours, folder)
    with torch.no_grad():
        expected, actual = model(tokens).logits, ours(tokens, ours.initial_state(2)).logits
    assert expected.abs().max() > 3, "large enough to be wrong"
    assert (expected - actual).abs().max() <= 1e-5, "the worst measured is 1.2e-6"
    params = {name: value.double().numpy() for name, value in ours.state_dict().items()}
    logits, _, _ = ref.forward(params, CONFIG, tokens.numpy(), ref.initial_state(params, CONFIG, 2))
    assert np.abs(logits - expected.double().numpy()).max() <= 1e-5 * np.abs(logits).max()


def test_the_gradient_of_a_fine_tuning_step_is_that_of_transformers(published):
    model, folder, tokens = published
    ours = PretrainedRecurrence(CONFIG)
    load_gpt2(ours, folder)
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    logits = ours(tokens, ours.initial_state(2)).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    expected = renamed({name: p.grad for name, p in model.transformer.named_parameters()}, CONFIG)
    for name, parameter in ours.named_parameters():
        if name.endswith("key_bias"):
            assert parameter.grad is None and expected[name].abs().max() < 1e-6, "only rounding in transformers"
        else:
            assert (expected[name] - parameter.grad).abs().max() <= 1e-4 * expected[name].abs().max(), name


def test_recurrence_is_added_to_the_same_weights(published):
    """With the recurrence module the first window still equals GPT-2, and the module keeps its initial weights."""
    model, folder, tokens = published
    config = dataclasses.replace(CONFIG, vectors=1, segment=12)
    ours, fresh = PretrainedRecurrence(config, seed=4).eval(), PretrainedRecurrence(config, seed=4)
    load_gpt2(ours, folder / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(ours.module.parameters(), fresh.module.parameters(), strict=True))
    with torch.no_grad():
        first, state, _ = ours(tokens[:, :12], ours.initial_state(2))
        assert (model(tokens[:, :12]).logits - first).abs().max() <= 1e-4
        assert (model(tokens[:, 12:]).logits - ours(tokens[:, 12:], state).logits).abs().max() > 1e-2


MASKS = {f"h.{i}.attn.{name}": torch.ones(1, 1, 24, 24) for i in range(3) for name in ("bias", "masked_bias")}
FORMS = {  # how weights are published: (what becomes of the tensors, the largest difference)
    "prefixed": (lambda tensors: {f"transformer.{name}": tensor for name, tensor in tensors.items()}, 0),
    "with masks": (lambda tensors: tensors | MASKS, 0),
    "with its head": (lambda tensors: tensors | {"lm_head.weight": tensors["wte.weight"].clone()}, 0),
    "half precision": (lambda tensors: {name: tensor.half() for name, tensor in tensors.items()}, 2e-3),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_that_are_published(file, form):
    model, expected = PretrainedRecurrence(CONFIG), PretrainedRecurrence(CONFIG)
    load_gpt2(expected, file)
    change, tolerance = FORMS[form]
    safetensors.save_file(change(gpt2_tensors()), file)
    load_gpt2(model, file)
    for name, value in expected.state_dict().items():
        assert (model.state_dict()[name] - value).abs().max() <= tolerance and model.state_dict()[name].dtype == torch.float32


def refusal(path, **sizes):
    """The message that refuses a file for a model of CONFIG with other sizes; it is one line, and nothing was loaded."""
    model = PretrainedRecurrence(dataclasses.replace(CONFIG, **sizes))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        load_gpt2(model, path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def one(value):
    """A matrix of the size of attn.c_proj with one odd value."""
    return torch.zeros(32, 32).index_put((torch.tensor([3]), torch.tensor([5])), torch.tensor(value))


TENSORS = {  # what: (tensors that are changed, added or, if None, removed; other sizes of the model; the message)
    "one missing": ({"h.2.mlp.c_fc.bias": None}, {}, "h.2.mlp.c_fc.bias should be (128,), is absent"),
    "one more": ({"h.1.attn.rotary.weight": torch.zeros(4)}, {}, "h.1.attn.rotary.weight should be absent, is (4,)"),
    "untied head": ({"lm_head.weight": torch.zeros(97, 32)}, {}, "lm_head.weight differs from wte.weight"),
    "NaN": ({"h.1.attn.c_proj.weight": one(torch.nan)}, {}, "h.1.attn.c_proj.weight has NaN or infinite values"),
    "infinite": ({"ln_f.bias": torch.full((32,), torch.inf)}, {}, "ln_f.bias has NaN or infinite values"),
    "matrix of one axis": ({"h.0.attn.c_attn.weight": torch.zeros(3)}, {}, "is not a GPT-2: h.0.attn.c_attn.weight should be"),
    "embedding of one axis": ({"wte.weight": torch.zeros(97)}, {}, "is not a GPT-2: wte.weight and wpe.weight are (97,)"),
    "odd bias": ({"h.1.attn.c_attn.bias": torch.zeros(95)}, {}, "is not a GPT-2: h.1.attn.c_attn.bias should be (96,), is (95,)"),
    "vocabulary": ({}, {"vocabulary": 98}, "has vocabulary 98; give the --tokenizer that it was trained with"),
    "positions": ({}, {"max_positions": 25}, "max_positions 24, the model has max_positions 25; give --max-positions 24"),
    "feed-forward": ({}, {"feed_forward": 64}, "give --feed-forward 128"),
    "width": ({}, {"width": 64, "feed_forward": 256}, "give --width 32 --feed-forward 128"),
    "layers": ({}, {"layers": 2, "heads": 2}, "has layers 3, the model has layers 2; give --layers 3"),
} | {
    f"quantised {dtype}": (
        {"h.1.mlp.c_fc.weight": torch.zeros(32, 128, dtype=dtype)},
        {},
        f"h.1.mlp.c_fc.weight is stored as {name}; give the weights in one of F16, BF16, F32, F64",
    )
    for name, dtype in {"I8": torch.int8, "U8": torch.uint8, "I64": torch.int64}.items()
}


@pytest.mark.parametrize("what", TENSORS)
def test_other_tensors_are_refused(file, what):
    changes, sizes, message = TENSORS[what]
    tensors = {name: tensor for name, tensor in (gpt2_tensors() | changes).items() if tensor is not None}
    safetensors.save_file(tensors, file)
    assert message in refusal(file, **sizes)


def test_a_published_size_is_named_by_its_preset(file):
    shapes = {"wte.weight": (97, 1024), "wpe.weight": (1024, 1024), "h.0.mlp.c_fc.bias": (4096,)}
    shapes |= {f"h.{i}.ln_1.weight": (1024,) for i in range(24)}
    with pytest.raises(InputError, match=r"has layers 24, width 1024, heads 16, .* has layers 3, .*; give --preset gpt2-medium"):
        check_described(file, shapes, CONFIG)
    assert check_gpt2(file.parent, CONFIG) == check_gpt2(file, CONFIG) == file


NESTED = {"lists": b"[" * 10**5, "objects": b'{"a":' * 10**5 + b"1" + b"}" * 10**5}
HEADERS = NESTED | {
    "a list": b"[1, 2, 3] ",
    "a size that overflows": b'{"wte.weight":{"dtype":"F32","shape":[97,4611686018427387904],"data_offsets":[0,0]}}',
    "a tensor without axes": b'{"wte.weight":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
    "another model": b'{"bert.pooler.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
}
FILES = {what: struct.pack("<Q", len(header)) + header + bytes(4) for what, header in HEADERS.items()} | {
    "HTML": b"<!DOCTYPE html><html><body>404</body></html>",
    "a pickle": pickle.dumps({"wte.weight": [1.0]}),
    "an empty file": b"",
    "no tensors": struct.pack("<Q", 2) + b"{}",
    "short of one byte": slice(-1),  # of a GPT-2
    "the header's beginning": slice(200),
}
HOLDS = {"a tensor without axes": "wte.weight", "another model": "bert.pooler.weight", "no tensors": ""}  # the others nothing


@pytest.mark.parametrize("what", FILES)
def test_the_message_says_what_a_wrong_file_is(file, what):
    content = FILES[what]
    file.write_bytes(content if isinstance(content, bytes) else file.read_bytes()[content])
    message, whole = refusal(file), f"is not a GPT-2: it holds {HOLDS.get(what)} ..."
    assert str(file) in message and "expected GPT-2 in safetensors" in message
    assert (whole if what in HOLDS else "is not a whole safetensors file (Error while deserializing header") in message


def test_bytes_behind_its_end_and_missing_files_and_packages_are_named(file, monkeypatch):
    file.write_bytes(file.read_bytes() + b"123")
    assert "is not a whole safetensors file (Error while deserializing header" in refusal(file)
    assert "no such file" in refusal(file.with_name("absent.safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "needs the package safetensors; install the extra: pip install -e '.[gpt2]'" in refusal(file)
    file.unlink()
    monkeypatch.undo()
    assert "neither model.safetensors nor checkpoint.pt" in refusal(file.parent)


@examples(100)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_describes_the_same_gpt2(data, tmp_path_factory):
    content = safetensors.save(gpt2_tensors())
    file = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    (length,) = struct.unpack("<Q", content[:8])
    at, byte = data.draw(st.integers(0, 8 + length - 1)), data.draw(st.integers(0, 255))
    file.write_bytes(content[:at] + bytes([byte]) + content[at + 1 :])
    with contextlib.suppress(InputError):
        assert check_gpt2(file, CONFIG) == file


def test_a_header_whose_length_looks_like_a_pickle_is_read(file):
    """A file whose header has 0x..0480 bytes begins like a pickle of protocol 4."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    longer = (size | 0xFFFF) + 1 + 0x0480
    file.write_bytes(longer.to_bytes(8, "little") + raw[8 : 8 + size].ljust(longer) + raw[8 + size :])
    assert file.read_bytes().startswith(b"\x80\x04")
    load_gpt2(PretrainedRecurrence(CONFIG), file)


USUAL = {"n_head": 4, "activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-05, "scale_attn_weights": True}
DESCRIBED = {  # what a config.json beside the file has: (its bytes, the message, None if it is loaded)
    **{f"nested {what}": (content, None) for what, content in NESTED.items()},
    **{what: (what.encode(), None) for what in ("no json", "{}", "[[1, 2]]", '{"n_head": 4}', json.dumps(USUAL))},
    "not UTF-8": (b"\xff", None),
    "other heads": (b'{"n_head": 2}', "has heads 2, the model has heads 4; give --heads 2"),
    "no heads": (b'{"n_head": [], "activation_function": {}}', "has heads [], the model has heads 4"),
    **{
        name: (json.dumps(USUAL | {name: value}).encode(), f"its config.json has {name} {value!r}, our model has ")
        for name, value in {
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-6,
            "scale_attn_by_inverse_layer_idx": True,
            "scale_attn_weights": False,
            "add_cross_attention": True,
        }.items()
    },
}


@pytest.mark.parametrize("what", DESCRIBED)
def test_a_gpt2_that_computes_something_else_is_refused(file, what):
    """The config.json beside it decides, since no shape shows these fields."""
    described, message = DESCRIBED[what]
    (file.parent / "config.json").write_bytes(described)
    if message is None:
        load_gpt2(PretrainedRecurrence(CONFIG), file)
    else:
        assert message in refusal(file)
