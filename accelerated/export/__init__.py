"""A run as files for other programs: weights, a program of torch alone, a model of transformers."""
