"""Carries activations and gradients between stages, and sums between ranks."""
