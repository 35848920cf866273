"""Brings GPU clocks back if any process dies: a guard process beside each rank, leases on disk.

A rank calls `hold.hold_gpu` before it locks a clock; that starts `process`, its guard.
"""
