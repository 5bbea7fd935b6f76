"""Continues a text of any length.

any_model.py does it with any model, a file named as a model faster; continuation.py draws tokens.
"""
