"""Schedules side by side: pictures and tables of docs/understand/schedules.md."""
