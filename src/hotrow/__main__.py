"""`python -m hotrow`, the same as `hotrow`."""

from hotrow.cli.main import main

if __name__ == "__main__":
    main()
