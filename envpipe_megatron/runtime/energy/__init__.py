"""Meters energy by window, and divides it."""
