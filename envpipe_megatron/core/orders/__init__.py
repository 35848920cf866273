"""Orders: builders of schedules from numbers only, and a list scheduler that builds any."""
