"""Decides on the planning rank, while training goes on, from what all ranks measure."""
