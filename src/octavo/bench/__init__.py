"""Measuring: workloads, how fast an engine does them, and how near that is to what the machine allows."""
