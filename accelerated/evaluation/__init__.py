"""Scoring what a model predicts, and one file for each report of eval.py. train.py and the bench score and sample with it too."""
