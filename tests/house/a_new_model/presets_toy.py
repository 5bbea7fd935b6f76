"""What others must know of the toy model, for test_new_model.py."""

from reference.toy import Config  # noqa: F401  for models.py

PRESETS = {"tiny": {"width": 16, "segment": 16, "steps": 3, "batch": 2}}
