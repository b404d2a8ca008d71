"""`python -m decaylab` is the `decaylab` command."""

from decaylab.cli import main

if __name__ == "__main__":
    main()
