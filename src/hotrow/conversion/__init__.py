"""Convert a model's embeddings to tables and its one-hot products to lookups."""
