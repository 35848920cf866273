"""Orders searched together with their clocks, over families, and what holds for all orders."""
