"""What a program needs whatever it computes: errors of one line, safe files, progress, Ctrl-C."""
