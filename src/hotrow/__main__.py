"""Run the `hotrow` command with `python -m hotrow`."""

from hotrow.cli.main import main

if __name__ == "__main__":
    main()
