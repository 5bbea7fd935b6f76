"""Scores a model's predictions, with one file for each report of eval.py; train.py and the bench use it too."""
