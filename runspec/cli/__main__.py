"""`python -m runspec.cli`: the same as the console script."""

from runspec.cli import main

main()
