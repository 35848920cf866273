"""Brings GPU clocks back, whatever dies: a guard process beside each rank, and leases on disk.

A rank calls `hold.hold_gpu` before it locks a clock; that starts `process`, its guard.
"""
