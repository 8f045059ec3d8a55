"""Compare lookup and one-hot arithmetic: the same numbers, and at what cost."""
