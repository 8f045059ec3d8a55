"""The layers: torch's embedding and linear layers, which take ids and one-hots alike."""
