"""Closed forms: apply many idle steps, which have no gradient, to a row at once."""
