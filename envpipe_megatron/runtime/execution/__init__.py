"""Executes a schedule's units, one after the other."""
