"""Bindings to training frameworks; each imports its own framework alone."""
