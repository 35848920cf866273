"""Asks for the clock of each unit, and watches that it comes."""
