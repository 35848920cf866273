"""Brings clocks back whatever dies: leases on disk and a process that looks after them."""
