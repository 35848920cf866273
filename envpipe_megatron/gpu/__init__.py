"""One interface to a GPU's clocks and meters, and its back ends."""
