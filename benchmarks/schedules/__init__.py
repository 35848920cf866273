"""Schedules side by side: the pictures and tables of docs/understand/schedules.md."""
