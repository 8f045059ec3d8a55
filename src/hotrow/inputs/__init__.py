"""Read tables, ids, texts and models from files."""
