"""All that exists for speed alone; without this folder everything works, only slower.

`accelerated/attention/heads.py::with_fast_path` asks for it, and paths.py answers.
"""
