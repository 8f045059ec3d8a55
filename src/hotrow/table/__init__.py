"""The table (a parameter whose rows are settled before they are read), its lookups and gradient."""
