"""The data of three Long Range Arena tasks: packed once, read as arrays. Knows nothing of models."""
