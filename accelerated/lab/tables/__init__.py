"""What the papers measured, measured here: tables of one command, and experiments with a command of their own."""
