"""What the papers measured, measured here: the tables of one command."""
