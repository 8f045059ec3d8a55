"""The table: a parameter whose rows settle before they are read, its lookups and its gradient."""
