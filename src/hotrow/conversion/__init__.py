"""Convert a model: make tables of its embeddings, and look-ups of its one-hot products."""
