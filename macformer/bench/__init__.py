"""Benchmarks: attentions, the core of the linear attention, training steps of whole models, and the data."""
