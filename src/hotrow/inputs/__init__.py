"""Read tables, ids, text and models from files."""
