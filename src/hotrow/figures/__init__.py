"""The kinds of figure: each a function that lays out cells, arrows and curves for `_svg`."""
