"""Compare a plain model and its converted copy."""
