"""The cases of the conformance vectors, and which values inside a layer they show; vectors.py writes them, tests check them."""

import dataclasses
import itertools
import re
from fnmatch import fnmatch

from reference import block_recurrent, compressive, memformer, memorizing, pretrained_recurrence

SMALL = {"vocabulary": 7, "width": 4, "heads": 2, "feed_forward": 5}
LAYERS = SMALL | {"layers": 2, "head_width": 3}
BUCKETS = {"buckets": 4, "max_distance": 6, "attention_scale": 3.0, "dropout": 0.0}
MEMFORMER = memformer.Config(
    **SMALL, encoder_layers=1, decoder_layers=1, head_width=3, segment=6, slots=5, max_distance=3, retention=0.5
)
CONFIGS = {
    "block_recurrent": block_recurrent.Config(**LAYERS, **BUCKETS, window=4, segment=8, recurrent_layers=(1,), states=5),
    "compressive": compressive.Config(**LAYERS, segment=4, memory=6, compressed_memory=3, compression_rate=2),
    "memformer": MEMFORMER,
    "memorizing": memorizing.Config(**LAYERS, **BUCKETS, segment=4, memory_layer=2, memory=9, retrieved=3),
    "pretrained_recurrence": pretrained_recurrence.Config(
        **(SMALL | {"width": 6}), layers=2, max_positions=9, segment=8, insertion_layers=(1,), module_width=4
    ),
}
SHORT = {"memory": 2}  # less than a segment: a segment's own rows are compressed at once
# Little, because all files together may have 3,150,000 bytes
LITTLE = {"layers": 1, "head_width": 2, "feed_forward": 2, "memory": 3, "compressed_memory": 2, "compression": "mean_pooling"}
SECOND = {"vocabulary": 3, "width": 3, "heads": 1, "head_width": 2, "feed_forward": 2, "window": 2, "segment": 4, "states": 2}
VARIANTS = {  # {paper: {case: the fields of its config that it changes}}
    "block_recurrent": {
        f"{gate}-{configuration}": {"gate": gate, "configuration": configuration}
        for gate, configuration in itertools.product(("fixed", "lstm"), ("skip", "single", "dual"))
    }
    | {
        "feedback": {"feedback": True},
        "feedback-of-layer-2": SECOND | {"feedback": True, "recurrent_layers": (2,)},
        "two-recurrent": {"layers": 3, "recurrent_layers": (1, 3)},
        "slide": {"recurrent_layers": ()},
        "xl": {"recurrent_layers": (), "segment": 4},
    },
    "compressive": {
        f"{compression}-{loss}": {"compression": compression, "compression_loss": loss}
        for compression, loss in itertools.product(compressive.COMPRESSIONS, compressive.COMPRESSION_LOSSES)
    }
    | {
        "short-memory": SHORT,
        "short-memory-bptt": SHORT | {"compression_loss": "bptt"},
        "short-memory-most_used": SHORT | {"compression": "most_used"},
        "compressed-only": {"memory": 0},
        "compressed-holds-half-a-segment": {"compressed_memory": 1, "compression_loss": "bptt"},
        "transformer-xl": {"compressed_memory": 0},
        "transformer-xl-short": {"compressed_memory": 0, "memory": 2},
        "no-memory": {"compressed_memory": 0, "memory": 0},
        "simplified": LITTLE | {"positions": "simplified", "max_distance": 5, "vocabulary": 3, "width": 3},
        "adaptive": LITTLE | {"cutoffs": (3, 5), "div_value": 2},
    },
    "memformer": {name: {} for name in ("continuation", "infilling", "recall", "all-tasks")}
    | {
        "two-layers": {"encoder_layers": 2, "decoder_layers": 2},
        "transformer-xl": {"positions": "transformer_xl"},
        "decoder-only": {"encoder_layers": 0, "decoder_layers": 2},
        "decoder-only-transformer-xl": {"encoder_layers": 0, "decoder_layers": 2, "positions": "transformer_xl"},
    },
    "memorizing": {"retrieval": {}, "short-memory": {"memory": 3, "layers": 1, "memory_layer": 1}},
    "pretrained_recurrence": {
        "mean": {},
        "max": {"pooling": "max"},
        "attention": {"pooling": "attention"},
        "several-vectors": {"vectors": 4},
        "several-layers": {"layers": 3, "insertion_layers": (1, 3)},
        "overlap": {"overlap": 2},
        "overlap-advance": {"overlap": 2, "pool": "advance"},
        "pooled-after-the-norm": {"pool_final_norm": True},
        "linear-module": {"module_layers": 0},
        "plain": {"vectors": 0},
    },
}
EVERY_CASE = [(paper, name) for paper, variants in VARIANTS.items() for name in variants]
TASKS = {  # {Memformer's case: the tasks of every lane in the second and third segment}; of others, none
    "infilling": ((1, 1, 1), (1, 1, 1)),
    "recall": ((2, 2, 2), (2, 2, 2)),
    "all-tasks": ((0, 1, 2), (1, 2, 0)),
    "transformer-xl": ((0, 1, 2), (1, 2, 0)),
}


def config_of(paper: str, name: str) -> object:
    """The config of a case."""
    return dataclasses.replace(CONFIGS[paper], **VARIANTS[paper][name])


# Values inside a layer, in the order of computation. Below a paper and its cases that have them (more would not fit) stand
# forward functions, each called by the one before it or further down, [1] in its second call, and VARIABLE=NAME, or a variable
# that keeps its name. They are of the first such call in the first segment; "return" is what a function returns.
INNER = """
block_recurrent fixed-skip lstm-dual
  layer[0] token_projection: normed=normed_input, projected.query=query
  layer[0]: keys, values
  layer[0] sliding_attention: bias=position_bias
  layer[0] attention: similarity, weights, return.0=attended
  state_projection: identified=identified_states, projected.key=state_key, projected.value=state_value
  state_projection: projected.query=state_query, projected.cross_query=state_cross_query
  layer[0] token_projection: projected.cross_query=cross_query
  recurrence attention[0]: weights=read_weights, return.0=read
  state_update attention[0]: return.0=states_from_states
  state_update attention[1]: return.0=states_from_tokens
block_recurrent fixed-skip lstm-dual fixed-dual
  state_update: attended=gate_input
  fixed_gate: z=gate_candidate, g=gate
  lstm_gate: z=gate_candidate, i=input_gate, f=forget_gate
  state_update: return.0=states_after_a_block
block_recurrent fixed-skip lstm-dual
  layer[0]: out=attention_output
  layer[0] token_mlp: hidden=mlp_hidden
  layer[0]: return.0=layer_output
block_recurrent feedback*
  state_projection: projected.key=state_key
  layer[0]: cross=read
  state_update: return.0=states_after_a_block
compressive conv-attention_reconstruction transformer-xl-short
  layer: h=layer_input
  distance_keys: sinusoids
  relative_attention: query, key, value, distance_key, by_distance=scores_by_distance
  relative_shift: return.0=scores_by_distance_shifted
  relative_attention: scores, weights, return.0=attended
  attend: return.0=attention_output
  layer: a=after_attention_norm
  mlp: hidden=mlp_hidden, return.0=mlp_output
  layer: return.0=layer_output
compressive *
  remember: evicted
compressive *most_used*
  remember: usage
compressive *
  remember: new
  attention_reconstruction: target=attention_over_evicted, out=attention_over_new
  auto_encoding: flat=decoded
memformer all-tasks transformer-xl decoder-only
  encoder_layer[0] self_attention: normal=normed_input, query, key, value
  encoder_layer[0] self_attention transformer_xl_attention: distance_key
  encoder_layer[0] self_attention relative_weights: by_distance=scores_by_distance, by_key=scores_by_key, scores, return.0=weights
  encoder_layer[0] self_attention simplified_attention: by_distance=weights_by_distance
  encoder_layer[0] simplified_attention: return.0=attended
  encoder_layer[0] transformer_xl_attention: return.0=attended
  encoder_layer[0] cross_attention: query=read_query, key=read_key
  encoder_layer[0] cross_attention masked_attention: weights=read_weights
  encoder_layer[0]: return.0=encoder_layer_output
  encoder: encoded
  slot_attention: normal=normed_slots, source=normed_encodings, query=slot_query, self_key=slot_self_key, key=slot_key
  slot_attention: value=slot_value, scores=slot_scores
  slot_mean: weights=slot_weights
  slot_attention: return.0=new_slots
  decoder_layer[0] self_attention: normal=decoder_normed_input
  decoder_layer[0] self_attention relative_weights: return.0=decoder_weights
  decoder_layer[0] masked_attention: weights=cross_weights
  decoder_layer[0]: return.0=decoder_layer_output
  memory_layer[0] self_attention: normal=normed_input, source=attention_source
  memory_layer[0] relative_weights: return.0=weights
  memory_layer[0]: return.0=layer_output
memorizing retrieval
  layer[0] projection: normed=normed_input, projected.query=query
  layer[0]: keys, values
  layer[0] local_attention: bias=position_bias
  layer[0] attention: similarity, weights, return.0=attended
  layer[0]: return.0=layer_output
  layer[1] attention: return.0=local
  layer[1] retrieval: return.0=found
  layer[1] memory_gate: g=gate, return.0=mixed
  layer[1]: out=attention_output
  layer[1] token_mlp: hidden=mlp_hidden
pretrained_recurrence mean
  layer[0] window_projections: normal=normed_input
  layer[0] window_attention: query, key, value
  layer[0] masked_attention: scores, weights, return.0=attended
  layer[0] window_attention: return.0=after_attention
  layer[0] gelu_mlp: normal=normed_mlp_input, before=before_gelu, hidden=mlp_hidden
  layer[0]: return.0=layer_output
pretrained_recurrence *
  module: return.0=inserted
  mix: shares=layer_shares
  pool: mixed, return.0=pooled
"""


def inner_values(paper: str, name: str) -> list[tuple[list, dict]]:
    """[(functions, {local variable: name})] of what a case shows of the inside of a layer."""
    listed, shown = [], False
    for line in INNER.strip().splitlines():
        if not line.startswith(" "):
            of, *cases = line.split()
            shown = of == paper and any(fnmatch(name, pattern) for pattern in cases)
        elif shown:
            functions, _, values = re.sub(r"(\w{2,})(?=.*: )", r"\1_forward", line).partition(": ")
            pairs = (value.rpartition("=") for value in values.split(", "))
            listed.append((functions.split(), {local or own: own for local, _, own in pairs}))
    return listed
