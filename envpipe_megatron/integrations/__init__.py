"""Bindings to training frameworks; each imports only its own framework."""
