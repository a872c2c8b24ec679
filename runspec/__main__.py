"""`python -m runspec`: the same as the `runspec` command."""

from runspec.cli import main

if __name__ == "__main__":
    main()
