"""Ways to read and set a real GPU's clock: NVML, Zeus's daemon, a command, none."""
