"""Compare lookups with one-hot arithmetic: the numbers and the cost."""
