"""One file for each optimizer: its update, and how the update changes a row without a gradient."""
