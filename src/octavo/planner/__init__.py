"""Sums before a deployment: what weights, keys and values take, and how many sequences that leaves room for."""
