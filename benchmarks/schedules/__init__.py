"""Schedules side by side, and the sweep of orders through bounded channels."""
