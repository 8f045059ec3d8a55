"""SVG figures, with one module for each kind."""
