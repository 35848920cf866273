"""Orders: builders of schedules from numbers alone, and a list scheduler that builds any."""
