"""What the closed loop of a job does, on emulated GPUs: what it costs to get, and after faults."""
