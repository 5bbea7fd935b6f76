"""Reports of eval.py that only a paper's table needs; eval.py finds them by name."""
