"""Optimizers: K-FAC, weight decay by param group, and the laws of how steps turn weights."""
