"""What the papers measured and built beside their method; nothing outside imports from it."""
