"""Reads a text token by token: a file named as a model keeps what the segment's tokens wrote."""
