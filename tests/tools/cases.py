"""The cases of the conformance vectors, and which values inside a layer they show; vectors.py writes them, tests check them."""

import dataclasses
import itertools
from typing import NamedTuple

from reference import block_recurrent, compressive, memformer, memorizing, pretrained_recurrence


class Case(NamedTuple):
    """A config, and of Memformer the tasks of every lane in the second and third segment."""

    config: object
    tasks: tuple = ()


def cases_of(small: object, variants: dict, tasks: dict | None = None) -> dict:
    """{name: Case} of the fields that the variants change."""
    return {name: Case(dataclasses.replace(small, **change), (tasks or {}).get(name, ())) for name, change in variants.items()}


SMALL = {"vocabulary": 7, "width": 4, "heads": 2, "feed_forward": 5}
LAYERS = SMALL | {"layers": 2, "head_width": 3}
BUCKETS = {"buckets": 4, "max_distance": 6, "attention_scale": 3.0, "dropout": 0.0}
BLOCK_RECURRENT = block_recurrent.Config(**LAYERS, **BUCKETS, window=4, segment=8, recurrent_layers=(1,), states=5)
COMPRESSIVE = compressive.Config(**LAYERS, segment=4, memory=6, compressed_memory=3, compression_rate=2)
MEMFORMER = memformer.Config(
    **SMALL, encoder_layers=1, decoder_layers=1, head_width=3, segment=6, slots=5, max_distance=3, retention=0.5
)
MEMORIZING = memorizing.Config(**LAYERS, **BUCKETS, segment=4, memory_layer=2, memory=9, retrieved=3)
PRETRAINED_RECURRENCE = pretrained_recurrence.Config(
    **(SMALL | {"width": 6}), layers=2, max_positions=9, segment=8, insertion_layers=(1,), module_width=4
)
SHORT = {"memory": 2}  # less than a segment: a segment's own rows are compressed at once
# Little, because all files together may have 3,150,000 bytes
LITTLE = {"layers": 1, "head_width": 2, "feed_forward": 2, "memory": 3, "compressed_memory": 2, "compression": "mean_pooling"}
SECOND = {"vocabulary": 3, "width": 3, "heads": 1, "head_width": 2, "feed_forward": 2, "window": 2, "segment": 4, "states": 2}
ADAPTIVE = LITTLE | {"cutoffs": (3, 5), "div_value": 2}
SIMPLIFIED = LITTLE | {"positions": "simplified", "max_distance": 5, "vocabulary": 3, "width": 3}
CASES = {
    "block_recurrent": cases_of(
        BLOCK_RECURRENT,
        {
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
    ),
    "compressive": cases_of(
        COMPRESSIVE,
        {
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
            "simplified": SIMPLIFIED,
            "adaptive": ADAPTIVE,
        },
    ),
    "memformer": cases_of(
        MEMFORMER,
        {name: {} for name in ("continuation", "infilling", "recall", "all-tasks")}
        | {
            "two-layers": {"encoder_layers": 2, "decoder_layers": 2},
            "transformer-xl": {"positions": "transformer_xl"},
            "decoder-only": {"encoder_layers": 0, "decoder_layers": 2},
            "decoder-only-transformer-xl": {"encoder_layers": 0, "decoder_layers": 2, "positions": "transformer_xl"},
        },
        {
            "infilling": ((1, 1, 1), (1, 1, 1)),
            "recall": ((2, 2, 2), (2, 2, 2)),
            "all-tasks": ((0, 1, 2), (1, 2, 0)),
            "transformer-xl": ((0, 1, 2), (1, 2, 0)),
        },
    ),
    "memorizing": cases_of(MEMORIZING, {"retrieval": {}, "short-memory": {"memory": 3, "layers": 1, "memory_layer": 1}}),
    "pretrained_recurrence": cases_of(
        PRETRAINED_RECURRENCE,
        {"mean": {}, "max": {"pooling": "max"}, "attention": {"pooling": "attention"}}
        | {
            "several-vectors": {"vectors": 4},
            "several-layers": {"layers": 3, "insertion_layers": (1, 3)},
            "overlap": {"overlap": 2},
            "overlap-advance": {"overlap": 2, "pool": "advance"},
            "pooled-after-the-norm": {"pool_final_norm": True},
            "linear-module": {"module_layers": 0},
            "plain": {"vectors": 0},
        },
    ),
}
EVERY_CASE = [(paper, case) for paper in CASES for case in CASES[paper]]

# Values inside a layer, in the order of computation: of the first call that matches (functions, each called by the one before it
# or further down; [1] is the second call) in the first segment, {local variable: name}. "return" is what the function returns.
SELF = ("encoder_layer_forward[0]", "self_attention_forward")
WRITER = {"normal": "normed_slots", "source": "normed_encodings"}
WRITER |= {name: f"slot_{name}" for name in ("query", "self_key", "key", "value", "scores")}
GATES_INNER = [
    (("state_update_forward",), {"attended": "gate_input"}),
    (("fixed_gate_forward",), {"z": "gate_candidate", "g": "gate"}),
    (("lstm_gate_forward",), {"z": "gate_candidate", "i": "input_gate", "f": "forget_gate"}),
    (("state_update_forward",), {"return.0": "states_after_a_block"}),
]
BLOCK_RECURRENT_INNER = [
    (("layer_forward[0]", "token_projection_forward"), {"normed": "normed_input", "projected.query": "query"}),
    (("layer_forward[0]",), {"keys": "keys", "values": "values"}),
    (("layer_forward[0]", "sliding_attention_forward"), {"bias": "position_bias"}),
    (("layer_forward[0]", "attention_forward"), {"similarity": "similarity", "weights": "weights", "return.0": "attended"}),
    (("state_projection_forward",), {"identified": "identified_states"}),
    (("state_projection_forward",), {f"projected.{name}": f"state_{name}" for name in ("key", "value", "query", "cross_query")}),
    (("layer_forward[0]", "token_projection_forward"), {"projected.cross_query": "cross_query"}),
    (("recurrence_forward", "attention_forward[0]"), {"weights": "read_weights", "return.0": "read"}),
    (("state_update_forward", "attention_forward[0]"), {"return.0": "states_from_states"}),
    (("state_update_forward", "attention_forward[1]"), {"return.0": "states_from_tokens"}),
    *GATES_INNER,
    (("layer_forward[0]",), {"out": "attention_output"}),
    (("layer_forward[0]", "token_mlp_forward"), {"hidden": "mlp_hidden"}),
    (("layer_forward[0]",), {"return.0": "layer_output"}),
]
FEEDBACK_INNER = [
    (("state_projection_forward",), {"projected.key": "state_key"}),
    (("layer_forward[0]",), {"cross": "read"}),
    (("state_update_forward",), {"return.0": "states_after_a_block"}),
]
COMPRESSIVE_INNER = [
    (("layer_forward",), {"h": "layer_input"}),
    (("distance_keys_forward",), {"sinusoids": "sinusoids"}),
    (("relative_attention_forward",), {name: name for name in ("query", "key", "value", "distance_key")}),
    (("relative_attention_forward",), {"by_distance": "scores_by_distance"}),
    (("relative_shift_forward",), {"return.0": "scores_by_distance_shifted"}),
    (("relative_attention_forward",), {"scores": "scores", "weights": "weights", "return.0": "attended"}),
    (("attend_forward",), {"return.0": "attention_output"}),
    (("layer_forward",), {"a": "after_attention_norm"}),
    (("mlp_forward",), {"hidden": "mlp_hidden", "return.0": "mlp_output"}),
    (("layer_forward",), {"return.0": "layer_output"}),
]
EVICTED_INNER = [(("remember_forward",), {"evicted": "evicted"})]
USAGE_INNER = [(("remember_forward",), {"usage": "usage"})]
COMPRESSION_INNER = [
    (("remember_forward",), {"new": "new"}),
    (("attention_reconstruction_forward",), {"target": "attention_over_evicted", "out": "attention_over_new"}),
    (("auto_encoding_forward",), {"flat": "decoded"}),
]
MEMFORMER_INNER = [
    (SELF, {"normal": "normed_input", "query": "query", "key": "key", "value": "value"}),
    ((*SELF, "transformer_xl_attention_forward"), {"distance_key": "distance_key"}),
    ((*SELF, "relative_weights_forward"), {"by_distance": "scores_by_distance", "by_key": "scores_by_key", "scores": "scores"}),
    ((*SELF, "relative_weights_forward"), {"return.0": "weights"}),
    ((*SELF, "simplified_attention_forward"), {"by_distance": "weights_by_distance"}),
    (("encoder_layer_forward[0]", "simplified_attention_forward"), {"return.0": "attended"}),
    (("encoder_layer_forward[0]", "transformer_xl_attention_forward"), {"return.0": "attended"}),
    (("encoder_layer_forward[0]", "cross_attention_forward"), {"query": "read_query", "key": "read_key"}),
    (("encoder_layer_forward[0]", "cross_attention_forward", "masked_attention_forward"), {"weights": "read_weights"}),
    (("encoder_layer_forward[0]",), {"return.0": "encoder_layer_output"}),
    (("encoder_forward",), {"encoded": "encoded"}),
    (("slot_attention_forward",), WRITER),
    (("slot_mean_forward",), {"weights": "slot_weights"}),
    (("slot_attention_forward",), {"return.0": "new_slots"}),
    (("decoder_layer_forward[0]", "self_attention_forward"), {"normal": "decoder_normed_input"}),
    (("decoder_layer_forward[0]", "self_attention_forward", "relative_weights_forward"), {"return.0": "decoder_weights"}),
    (("decoder_layer_forward[0]", "masked_attention_forward"), {"weights": "cross_weights"}),
    (("decoder_layer_forward[0]",), {"return.0": "decoder_layer_output"}),
    (("memory_layer_forward[0]", "self_attention_forward"), {"normal": "normed_input", "source": "attention_source"}),
    (("memory_layer_forward[0]", "relative_weights_forward"), {"return.0": "weights"}),
    (("memory_layer_forward[0]",), {"return.0": "layer_output"}),
]
MEMORIZING_INNER = [
    (("layer_forward[0]", "projection_forward"), {"normed": "normed_input", "projected.query": "query"}),
    (("layer_forward[0]",), {"keys": "keys", "values": "values"}),
    (("layer_forward[0]", "local_attention_forward"), {"bias": "position_bias"}),
    (("layer_forward[0]", "attention_forward"), {"similarity": "similarity", "weights": "weights", "return.0": "attended"}),
    (("layer_forward[0]",), {"return.0": "layer_output"}),
    (("layer_forward[1]", "attention_forward"), {"return.0": "local"}),
    (("layer_forward[1]", "retrieval_forward"), {"return.0": "found"}),
    (("layer_forward[1]", "memory_gate_forward"), {"g": "gate", "return.0": "mixed"}),
    (("layer_forward[1]",), {"out": "attention_output"}),
    (("layer_forward[1]", "token_mlp_forward"), {"hidden": "mlp_hidden"}),
]
PRETRAINED_RECURRENCE_INNER = [
    (("layer_forward[0]", "window_projections_forward"), {"normal": "normed_input"}),
    (("layer_forward[0]", "window_attention_forward"), {name: name for name in ("query", "key", "value")}),
    (("layer_forward[0]", "masked_attention_forward"), {"scores": "scores", "weights": "weights", "return.0": "attended"}),
    (("layer_forward[0]", "window_attention_forward"), {"return.0": "after_attention"}),
    (("layer_forward[0]", "gelu_mlp_forward"), {"normal": "normed_mlp_input", "before": "before_gelu", "hidden": "mlp_hidden"}),
    (("layer_forward[0]",), {"return.0": "layer_output"}),
]
POOLING_INNER = [
    (("module_forward",), {"return.0": "inserted"}),
    (("mix_forward",), {"shares": "layer_shares"}),
    (("pool_forward",), {"mixed": "mixed", "return.0": "pooled"}),
]
INNER_VALUES = {  # {paper: [(values, the cases that have them; None is all)]}: more would not fit
    "block_recurrent": [
        (BLOCK_RECURRENT_INNER, ("fixed-skip", "lstm-dual")),
        (GATES_INNER, ("fixed-dual",)),
        (FEEDBACK_INNER, ("feedback", "feedback-of-layer-2")),
    ],
    "compressive": [
        (COMPRESSIVE_INNER, ("conv-attention_reconstruction", "transformer-xl-short")),
        (EVICTED_INNER, None),
        (USAGE_INNER, tuple(name for name in CASES["compressive"] if "most_used" in name)),
        (COMPRESSION_INNER, None),
    ],
    "memformer": [(MEMFORMER_INNER, ("all-tasks", "transformer-xl", "decoder-only"))],
    "memorizing": [(MEMORIZING_INNER, ("retrieval",))],
    "pretrained_recurrence": [(PRETRAINED_RECURRENCE_INNER, ("mean",)), (POOLING_INNER, None)],
}
