"""What a pipeline is: schedules, timelines, profiles, conditions, plans. No torch, no GPU."""
