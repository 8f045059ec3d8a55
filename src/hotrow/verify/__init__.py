"""Compare the results and the cost of lookups with those of one-hot arithmetic."""
