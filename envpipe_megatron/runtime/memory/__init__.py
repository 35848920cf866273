"""How much memory an order takes, and how much there is."""
