"""Figures as SVG, with one file for each kind."""
