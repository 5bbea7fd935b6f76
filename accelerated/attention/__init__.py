"""Heads and norms, which the models share, and one file per kind of attention, each with a plain and a fast path."""
