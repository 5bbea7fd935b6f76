"""Readable NumPy references, one self-contained file per paper."""
