"""Policies: from a schedule and a profile to a plan."""
