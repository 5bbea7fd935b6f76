"""Fast PyTorch implementations of the same models, and what trains and evaluates them."""
