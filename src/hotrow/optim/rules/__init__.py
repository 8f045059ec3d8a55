"""One file for each optimizer: its update, and what it does to a row without a gradient."""
