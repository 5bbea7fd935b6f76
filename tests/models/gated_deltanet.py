"""Gated DeltaNet: what its tests must know, by the names of tests/helpers/variants.py."""

LONG_LIVED = ("matrices", "inputs")
SOLVES = True
