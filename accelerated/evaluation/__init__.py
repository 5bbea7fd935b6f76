"""Scores a model's predictions, with one file for each report of eval.py; train.py and lab/speed use it too."""
