"""`python -m decaylab` is the `decaylab` command."""

from decaylab.cli import main

main()
