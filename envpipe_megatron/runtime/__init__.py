"""Runs inside a training process; knows torch, but no training framework."""
