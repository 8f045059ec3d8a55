"""Closed forms, which apply many idle steps (steps without a gradient) to a row at once."""
