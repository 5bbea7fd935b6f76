"""Gated DeltaNet: what its tests must know, by the names of tests/helpers/variants.py."""

VARIANTS = {
    "three-layers": {},
    "one-layer": {"layers": 1},
    "two-tokens": {"segment": 2},
    "several-chunks": {"layers": 1, "segment": 70},
}
KINDS = ("three-layers",)

CARRIED = ("matrices", "inputs")
LONG_LIVED = ("matrices", "inputs")
SOLVES = True
WRONG_LENGTHS = {length: f"{length} tokens is not one of" for length in (0, 3, 71)}
DESCRIBED = {
    "three-layers": (9, "reach 9 tokens back; 3 layers x 2 matrices of 5 x 8 hold the rest"),
}
