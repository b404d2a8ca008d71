"""Write the blocks of some pages anew: `PYTHONPATH=docs python -m results_pages README.md ...`."""

import argparse
import sys
from pathlib import Path

from decaylab.errors import DecaylabError
from results_pages.blocks import refresh


def main(words: list[str] | None = None) -> None:
    """Refresh the pages; an error that can be mended is a sentence."""
    parser = argparse.ArgumentParser(description="Write what records say into Markdown pages.")
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--runs", type=Path, default=Path("results"))
    given = parser.parse_args(words)
    if not given.runs.is_dir():  # misspelt, it would empty the pages
        sys.exit(f"there is no folder {given.runs}")
    try:
        changed = refresh(given.pages, given.runs)
    except DecaylabError as error:
        sys.exit(str(error))
    print(f"{len(changed)} changed")


if __name__ == "__main__":
    main()
