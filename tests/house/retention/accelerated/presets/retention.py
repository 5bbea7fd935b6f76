"""Presets of retention; imports no torch."""

from reference.retention import Config

PRESETS = {"tiny": {"width": 64, "segment": 32, "steps": 100, "batch": 8, "learning_rate": 3e-3}}
TEST_CONFIG = Config(vocabulary=11, width=6, segment=4, decay=0.8)
