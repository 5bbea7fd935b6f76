"""Scoring, positions, overlap, export and the page of eval.py view: the reports of eval.py."""
