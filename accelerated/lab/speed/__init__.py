"""Speed and memory: python -m accelerated.lab.speed."""
