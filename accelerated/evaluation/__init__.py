"""Scoring what a model predicts, and one file for each report of eval.py."""
