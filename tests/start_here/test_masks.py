"""Who sees whom: every attention mask as a picture, compared with what the models do.

A row of a picture is a query, one of the 4 tokens of a segment. A column is a key: a row of the
state, or a token. There is an x where the query sees the key. No mask of ours is read to find out:
a key is changed, and the queries whose output changes have seen it. NumPy and PyTorch must both
give the picture. The models have one layer, or else a query would see more keys through other
tokens. `pytest -s` prints what was found.

Then come drawn sizes, variants and layers of every model. Whatever they are, a token that is
changed changes no earlier prediction, and none of another lane.
"""

from functools import partial
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from accelerated.attention import sliding_window
from accelerated.generation.any_model import stepper_of
from accelerated.models import NAMES, model_class
from reference import block_recurrent, compressive, memformer, pretrained_recurrence
from tests.conftest import examples
from tests.start_here.strategies import logits_by_segments, settings_of

# Sizes differ, so that no axis is taken for another: N is 4, S is 5, W is 2
SIZES = {"vocabulary": 19, "width": 18, "heads": 3, "feed_forward": 7, "segment": 4}
LAYER = SIZES | {"layers": 1, "head_width": 8}
BLOCKS = LAYER | {"window": 2, "states": 5, "recurrent_layers": (1,)}
ROWS = LAYER | {"memory": 5, "compressed_memory": 2, "compression_rate": 2}
XL = ROWS | {"compressed_memory": 0}
SLOTS = SIZES | {"encoder_layers": 1, "decoder_layers": 1, "head_width": 8, "slots": 5}
GPT2 = SIZES | {
    "layers": 1,
    "insertion_layers": (1,),
    "vectors": 2,
    "max_positions": 9,
    "module_width": 5,
}


class Model(NamedTuple):
    reference: ModuleType
    sizes: dict
    keys: dict  # {a field of the state, or "tokens": the axis along which its keys stand}
    picture: str  # a column for each key, in this order


ENCODER = "Memformer's encoder"
MODELS = {
    # Section 3.2: all states, the W = 2 tokens before a token and, through the residual, the token.
    # The second block's states have read the first block and the one before
    "Block-Recurrent": Model(
        block_recurrent,
        BLOCKS,
        {"states": 2, "values": 3, "tokens": 1},
        """
        xxxxx xx x...
        xxxxx .x xx..
        xxxxx xx xxx.
        xxxxx xx xxxx
        """,
    ),
    # All of the memory, and the tokens up to itself
    "Transformer-XL": Model(
        compressive,
        XL,
        {"memory": 2, "tokens": 1},
        """
        xxxxx x...
        xxxxx xx..
        xxxxx xxx.
        xxxxx xxxx
        """,
    ),
    # Figure 1: compressed memory besides
    "Compressive": Model(
        compressive,
        ROWS,
        {"compressed": 2, "memory": 2, "tokens": 1},
        """
        xx xxxxx x...
        xx xxxxx xx..
        xx xxxxx xxx.
        xx xxxxx xxxx
        """,
    ),
    # Figure 2a: by its encoder all slots and the segment before, and the tokens up to itself
    "Memformer": Model(
        memformer,
        SLOTS,
        {"memory": 2, "previous": 1, "tokens": 1},
        """
        xxxxx xxxx x...
        xxxxx xxxx xx..
        xxxxx xxxx xxx.
        xxxxx xxxx xxxx
        """,
    ),
    # Its queries are the tokens of the segment before: each sees all of them
    ENCODER: Model(
        memformer,
        SLOTS,
        {"memory": 2, "previous": 1},
        """
        xxxxx xxxx
        xxxxx xxxx
        xxxxx xxxx
        xxxxx xxxx
        """,
    ),
    # Figure 1: what the windows before have left, and the tokens up to itself
    "Recurrence in GPT-2": Model(
        pretrained_recurrence,
        GPT2,
        {"pooled": 0, "tokens": 1},
        """
        x x...
        x xx..
        x xxx.
        x xxxx
        """,
    ),
}
# Block-Recurrent's attention by itself: the W = 2 tokens before a token, some in the block before
SLIDING = """
        xx ....
        .x x...
        .. xx..
        .. .xx.
        """


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_sees_what_its_picture_shows(name):
    """A token sees the memory that its paper gives it, and no token after it."""
    ref, sizes, keys, picture = MODELS[name]
    config = ref.Config(**sizes)
    model = model_class(ref.__name__.removeprefix("reference."))(config).eval()
    params = {key: parameter.numpy() for key, parameter in model.named_parameters()}
    # Two segments: one that the state is of, and one that is read. A token plus 1 is another token
    text = np.random.default_rng(0).integers(config.vocabulary - 1, size=(2, 1, config.segment))
    _, state, _ = ref.forward(params, config, text[0], ref.initial_state(params, config, 1))
    inputs = state._asdict() | {"tokens": text[1]}

    if name == ENCODER:
        by_numpy = partial(encoder_in_numpy, params, config)
        by_pytorch = partial(encoder_in_pytorch, model)
    else:
        by_numpy = partial(model_in_numpy, ref, params, config)
        by_pytorch = partial(model_in_pytorch, model)
    compare(f"{name} in NumPy", inputs, keys, picture, by_numpy)
    compare(f"{name} in PyTorch", inputs, keys, picture, by_pytorch)


def model_in_numpy(ref, params, config, inputs):
    """The logits (1, N, V) of inputs: the state's fields and tokens."""
    fields = {field: inputs[field] for field in ref.State._fields}
    logits, _, _ = ref.forward(params, config, inputs["tokens"], ref.State(**fields))
    return logits


def model_in_pytorch(model, inputs):
    initial = model.initial_state(1)
    fields = {field: torch.tensor(inputs[field]) for field in initial._fields}
    return model(torch.tensor(inputs["tokens"]), type(initial)(**fields)).logits.numpy()


def encoder_in_numpy(params, config, inputs):
    """The encoder's hidden states (1, N, D) of the segment before."""
    state = memformer.State(inputs["memory"], inputs["previous"])
    encoded, *_ = memformer.encoder_forward(params, config, inputs["tokens"], state, None)
    return encoded


def encoder_in_pytorch(model, inputs):
    slots = torch.tensor(inputs["memory"][:, 0])
    x = model.embedding[torch.tensor(inputs["previous"])]
    return model.encoder(x, slots, None).numpy()


def compare(who, inputs, keys, picture, read):
    """Fail, naming the query and the key, unless each key changes the outputs that see it."""
    before = read(inputs)
    columns = {}  # {the key's name: which queries see it (N,)}
    for name, axis in keys.items():
        for number in range(inputs[name].shape[axis]):
            changed = inputs[name].copy()
            key = np.moveaxis(changed, axis, 0)[number]
            key[..., 0] += 1  # its first number, in every layer and head
            difference = np.abs(read(inputs | {name: changed}) - before)[0]  # (N, D or V)
            columns[f"key {number} of {name}"] = (difference > 1e-9).any(axis=-1)
    found = np.stack(list(columns.values()), axis=1)  # (N, keys)
    check_picture(who, found, picture, list(columns))


def check_picture(who, found, picture, names):
    """Fail at the first place where found (N, keys) is not what the picture shows."""
    rows = picture.replace(" ", "").split()
    expected = np.array([list(row) for row in rows]) == "x"
    print(f"\n{who}")
    for row in np.where(found, "x", "."):
        print("".join(row))
    for query, key in np.argwhere(found != expected):
        sees = "sees" if found[query, key] else "does not see"
        pytest.fail(f"{who}: token {query} {sees} {names[key]}, unlike in its picture:{picture}")


def test_block_recurrent_attention_sees_the_tokens_before_a_token_and_not_the_token():
    """Section 3.1. The keys' values are one-hot here, so that what a query reads is its weights."""
    config = block_recurrent.Config(**BLOCKS)
    rng = np.random.default_rng(0)
    heads = 3
    queries = 4
    count = config.window + queries  # keys of the block before, and of the segment
    query = rng.standard_normal((1, heads, queries, count))
    keys = rng.standard_normal((1, heads, count, count))
    values = np.tile(np.eye(count), (1, heads, 1, 1))
    scale = np.array([2.0, 3.0, 1.0])  # (H,)
    bias = rng.standard_normal((heads, 10))  # by bucket of distances

    p = {"scale": scale, "position_bias": bias}
    by_numpy, _ = block_recurrent.sliding_attention_forward(p, config, query, keys, values, None)
    tables = sliding_window.tables_by_distance(config.window, 10, config.max_distance)
    by_distance = sliding_window.score_offset(torch.tensor(bias), torch.tensor(scale), *tables)
    by_pytorch = sliding_window.sliding_attention(
        torch.tensor(query * scale[:, None, None]),
        torch.tensor(keys),
        torch.tensor(values),
        by_distance,
    )

    names = [f"key {key}" for key in range(count)]
    for head in range(heads):
        check_picture("NumPy's attention", by_numpy[0, head] > 0, SLIDING, names)
        check_picture("PyTorch's attention", by_pytorch[0, head].numpy() > 0, SLIDING, names)


# ----------------------------------------------------------------------------
# every model, of drawn sizes
@pytest.mark.parametrize("name", NAMES)
@examples(5)
@given(data=st.data())
@torch.no_grad()
def test_a_token_changes_no_earlier_prediction_and_no_other_lane(name, data):
    """Read at once by NumPy and by PyTorch, and token by token, over two segments."""
    setting = data.draw(settings_of(name, lanes=2))
    config = setting.config
    note(f"{config}")
    overlap = getattr(config, "overlap", 0)
    text = setting.rng.integers(config.vocabulary, size=(2, 2 * config.segment - overlap))
    place = data.draw(st.integers(0, text.shape[1] - 1), label="the token that is changed")
    changed = text.copy()
    changed[0, place] = (changed[0, place] + 1) % config.vocabulary
    may_differ = np.zeros(text.shape, bool)
    may_differ[0, place:] = True

    for read in READERS:
        apart = np.abs(read(setting, changed) - read(setting, text)).max(-1)
        differs = apart > UNSEEN  # (lanes, tokens)
        picture = draw_differences(differs, may_differ)
        assert not (differs & ~may_differ).any(), (
            f"{name} by {read.__name__}: token {place} of the upper lane was changed, and ! is a "
            f"prediction that should not have seen it{picture}"
        )
        assert apart[0, place] > READ, (
            f"{name} by {read.__name__}: token {place} of the upper lane was changed, and its own "
            f"prediction is the same{picture}"
        )


def numpys_logits(setting, text):
    read = partial(setting.reference.forward, setting.params, setting.config)
    return logits_by_segments(read, setting.config, text, setting.state)


def pytorchs_logits(setting, text):
    state = setting.in_torch(setting.state)
    return logits_by_segments(setting.model.eval(), setting.config, torch.tensor(text), state)


def logits_by_steps(setting, text):
    """As in generation."""
    stepper = stepper_of(setting.model.eval())
    stream = stepper.start(setting.in_torch(setting.state))
    logits = []
    for token in torch.tensor(text).unbind(1):
        found, stream = stepper.step(token, stream)
        logits.append(found)
    return torch.stack(logits, 1).numpy()


READERS = (numpys_logits, pytorchs_logits, logits_by_steps)
# How much a prediction that has not seen the changed token may differ: rounding, because the words
# of a tail of adaptive inputs are projected together, however many they are
UNSEEN = 1e-12
READ = 1e-8  # how much the changed token's own prediction differs at least


def draw_differences(differs, may_differ):
    """A row for each lane: x differs and may, ! differs and may not, . is the same."""
    marks = np.where(differs, np.where(may_differ, "x", "!"), ".")
    return "".join(f"\n        {''.join(row)}" for row in marks)
