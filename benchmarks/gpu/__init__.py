"""What real GPUs say: orders in one process, the cost of a unit; fits of presets; guard faults."""
