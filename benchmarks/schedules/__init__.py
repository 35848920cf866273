"""Schedules side by side: the pictures and tables of docs/schedules.md."""
