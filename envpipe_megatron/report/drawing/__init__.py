"""Figures, one function each; `style` has what they share."""
