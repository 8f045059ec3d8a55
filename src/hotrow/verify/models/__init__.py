"""Compare a plain model with its converted copy."""
