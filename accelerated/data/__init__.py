"""From a text to segments: sources, named sets, tokenizers, corpus, windows, lanes, tasks."""
