"""Planners compared, and the simulator against what was measured."""
