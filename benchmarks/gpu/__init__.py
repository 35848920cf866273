"""What real GPUs say: meters, clocks, orders and the whole loop; fits of presets; guard faults."""
