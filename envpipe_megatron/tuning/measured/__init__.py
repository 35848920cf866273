"""Measurements of units, and what is fitted to them."""
