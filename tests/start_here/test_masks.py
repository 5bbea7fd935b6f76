"""Who sees whom: the attention masks as pictures, compared with what the models do. `pytest -s` prints what was found.

A row is a query, a column a key, x if the query sees it. No mask is read: a key is changed, and queries whose output
changes are marked. NumPy and PyTorch must both give the picture. One layer: nothing is seen through other tokens.
"""

import numpy as np
import pytest
import torch

from accelerated.attention import sliding_window
from accelerated.models import model_class
from reference import block_recurrent, compressive, memformer, pretrained_recurrence

SIZES = {"vocabulary": 19, "width": 12, "heads": 3, "feed_forward": 7}
BLOCKS = SIZES | {
    "head_width": 8,
    "layers": 1,
    "window": 2,
    "segment": 4,
    "states": 5,
    "recurrent_layers": (1,),
}
ROWS = SIZES | {
    "head_width": 8,
    "layers": 1,
    "segment": 4,
    "memory": 5,
    "compressed_memory": 2,
    "compression_rate": 2,
}
SLOTS = SIZES | {
    "head_width": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "segment": 4,
    "slots": 5,
}
GPT = SIZES | {
    "layers": 1,
    "segment": 4,
    "max_positions": 6,
    "insertion_layers": (1,),
    "vectors": 2,
    "module_width": 5,
}
MODELS = {  # the model, its sizes, and its columns: {field of the state, or tokens: the axis along which its keys stand}
    "recurrent": (block_recurrent, BLOCKS, {"states": 2, "values": 3, "tokens": 1}),
    "Transformer-XL": (compressive, ROWS | {"compressed_memory": 0}, {"memory": 2, "tokens": 1}),
    "compressive": (compressive, ROWS, {"compressed": 2, "memory": 2, "tokens": 1}),
    "Memformer": (memformer, SLOTS, {"memory": 2, "previous": 1, "tokens": 1}),
    "its encoder": (memformer, SLOTS, {"memory": 2, "previous": 1}),
    "GPT-2": (pretrained_recurrence, GPT, {"pooled": 0, "tokens": 1}),
}
# sliding: the W = 2 tokens before, not the token (3.1); recurrent adds the token itself and the block before (3.2)
PICTURES = """
sliding | recurrent     | Transformer-XL | compressive   | Memformer       | its encoder | GPT-2
xx .... | xxxxx xx x... | xxxxx x...     | xx xxxxx x... | xxxxx xxxx x... | xxxxx xxxx  | x x...
.x x... | xxxxx .x xx.. | xxxxx xx..     | xx xxxxx xx.. | xxxxx xxxx xx.. | xxxxx xxxx  | x xx..
.. xx.. | xxxxx xx xxx. | xxxxx xxx.     | xx xxxxx xxx. | xxxxx xxxx xxx. | xxxxx xxxx  | x xxx.
.. .xx. | xxxxx xx xxxx | xxxxx xxxx     | xx xxxxx xxxx | xxxxx xxxx xxxx | xxxxx xxxx  | x xxxx"""
COLUMNS = zip(*(line.split("|") for line in PICTURES.split("\n")[1:]), strict=True)
PICTURE = {name.strip(): [row.replace(" ", "") for row in rows] for name, *rows in COLUMNS}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_sees_what_its_picture_shows(name):
    ref, sizes, axes = MODELS[name]
    config, text = (
        ref.Config(**sizes),
        np.random.default_rng(0).integers(18, size=(2, 1, sizes["segment"])),
    )  # + 1 is a token too
    model = model_class(ref.__name__.partition(".")[2])(config).double().eval()
    params = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    state = ref.forward(params, config, text[0], ref.initial_state(params, config, 1))[1]
    reads = {  # {what makes one side's arrays: (tokens, fields of the state) -> what must change if a query sees the key}
        np.asarray: lambda tokens, **fields: ref.forward(
            params, config, tokens, type(state)(**fields)
        )[0],
        torch.tensor: lambda tokens, **fields: (
            model(tokens, type(model.initial_state(1))(**fields)).logits
        ),
    }
    if name == "its encoder":
        reads = {
            np.asarray: lambda memory, previous, **_: ref.encoder_forward(
                params, config, previous, memory[:, 0], None, None
            )[0],
            torch.tensor: lambda memory, previous, **_: model.encoder(
                model.embedding[previous], memory[:, 0], None
            ),
        }
    for array, read in reads.items():
        inputs, columns = state._asdict() | {"tokens": text[1]}, []
        before = read(**{name: array(x) for name, x in inputs.items()})
        for field, axis in axes.items():
            for key in range(inputs[field].shape[axis]):
                changed = inputs[field].copy()
                np.moveaxis(changed, axis, 0)[key, ..., 0] += (
                    1  # this key's first number, in every layer and head
                )
                after = read(**{name: array(x) for name, x in (inputs | {field: changed}).items()})
                columns.append(
                    (abs(after - before)[0] > 1e-9).any(-1)
                )  # (N,): which queries saw it
        found = ["".join(np.where(row, "x", ".")) for row in np.array(columns).T]
        print(f"\n{name}", *found, sep="\n")
        assert found == PICTURE[name]


def test_block_recurrent_attention_sees_the_tokens_before_a_token_and_not_the_token():
    """The values are one-hot, so that what a query reads is its weights."""
    rng, scale, config = (
        np.random.default_rng(0),
        np.array([2.0, 3.0, 1.0]),
        block_recurrent.Config(**BLOCKS),
    )
    query, keys, bias = (
        rng.standard_normal(shape) for shape in ((1, 3, 4, 6), (1, 3, 6, 6), (3, 8))
    )
    given, p = (
        (query, keys, np.tile(np.eye(6), (1, 3, 1, 1))),
        {"scale": scale, "position_bias": bias},
    )
    by_numpy, _ = block_recurrent.sliding_attention_forward(p, config, *given, None)
    query, keys, values, scale, bias = map(torch.tensor, (*given, scale, bias))
    by_distance = sliding_window.score_offset(
        bias, scale, *sliding_window.tables_by_distance(2, 8, 128)
    )
    offset = sliding_window.by_query_and_key(by_distance, 2)
    for weights in (
        *by_numpy[0],
        *sliding_window.sliding_attention(query * scale[:, None, None], keys, values, offset)[0],
    ):
        assert ["".join(np.where(row > 0, "x", ".")) for row in weights] == PICTURE["sliding"]
