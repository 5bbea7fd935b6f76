"""Continues a text of any length.

any_model.py does it with any model; continuation.py draws tokens.
"""
