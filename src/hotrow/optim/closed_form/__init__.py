"""Closed forms: many steps without a gradient at once."""
