"""What the papers offer beside their published methods, one file per paper."""
