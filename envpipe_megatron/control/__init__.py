"""What the planning rank decides while training goes on, from what all ranks measure."""
