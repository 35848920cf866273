"""What a plan is made for: least energy, time, cost or energy x time, within limits."""
