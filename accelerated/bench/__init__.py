"""Speed and memory: python -m accelerated.bench."""
