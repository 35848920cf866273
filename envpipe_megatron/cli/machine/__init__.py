"""Commands about this machine: what it can do, and its GPUs' clocks."""
