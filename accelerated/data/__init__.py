"""From a text to the segments that a model reads: sources, named sets, tokenizers, corpus, windows, lanes, tasks."""
