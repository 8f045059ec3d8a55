"""Convert a model: its embeddings to tables, its one-hot products to lookups."""
