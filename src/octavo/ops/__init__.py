"""Backends: the dozen fused operations every model is written in."""
