"""What the models share: heads and norms, and one file per kind of attention, plain path beside fast path."""
