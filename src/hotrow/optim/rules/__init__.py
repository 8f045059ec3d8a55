"""The rules of the optimizers, one per file: the update and, if there is one, a closed form."""
