"""The command-line interface, with one file per command."""
