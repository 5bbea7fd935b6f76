"""The tables, one file per paper and one for what a memory can hold; each begins with what it compares."""
