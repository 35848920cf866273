"""The least energy of an order within a time, with a certificate."""
