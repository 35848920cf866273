"""Measures what a plan needs to know, while training goes on."""
