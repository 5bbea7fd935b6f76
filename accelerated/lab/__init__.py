"""What the papers measured and built beside their method; nothing outside this folder imports from it."""
