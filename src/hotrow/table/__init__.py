"""Tables (parameters that settle rows before they are read), with their lookups and gradients."""
