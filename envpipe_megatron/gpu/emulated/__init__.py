"""GPUs whose time and power follow a model, for machines without any."""
