"""The rules of the optimizers, one file each: the update, and its effect on an idle row."""
