"""Continues a text of any length: any_model.py with any model, a file named as a model faster, continuation.py draws the tokens."""
