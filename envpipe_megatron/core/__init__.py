"""The pipeline as data: schedules, timelines, profiles, conditions, plans. No torch, no GPU."""
