"""Run the `hotrow` command with `python -m hotrow`."""

from _hotrow_command import main

if __name__ == "__main__":
    main()
