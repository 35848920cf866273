"""Probes say what to look at: each is a file."""
