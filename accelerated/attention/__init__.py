"""What the models share: heads, norms, and one file per kind of attention, plain and fast."""
