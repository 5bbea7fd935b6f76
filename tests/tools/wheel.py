"""The command for wheels that pyproject.toml names: it refuses, because train.py, eval.py and docs
would be missing.
"""

from setuptools.command.bdist_wheel import bdist_wheel


class NoWheel(bdist_wheel):
    """Ends with one line instead of building a wheel; `pip install -e .` does not run it."""

    def run(self):
        raise SystemExit(
            "this is a clone, not a package, and no wheel is made of it; use: pip install -e ."
        )
