"""The rules of the optimizers, one per file: the update and its effect on an idle row."""
