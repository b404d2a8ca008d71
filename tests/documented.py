"""The blocks of the pages, so that tests can run them as they stand there."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
FENCED = re.compile(r"(?:<!-- run: ([^>]+) -->\n)?```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page):
    """(name or "", language, text) of each block; `<!-- run: NAME -->` before it names it."""
    return FENCED.findall(Path(page).read_text(encoding="utf-8"))


def snippet_text(page, name):
    """The block of that name."""
    (found,) = [text for given, _, text in blocks(ROOT / "docs" / page) if given == name]
    return found


def snippet(page, name):
    """The block of that name, compiled: its errors tell the page."""
    return compile(snippet_text(page, name), f"{page}: {name}", "exec")


def commands(page, program="decaylab"):
    """The command lines of a page, without their comments and the program's name, as words."""
    lines = [line for _, _, text in blocks(page) for line in text.splitlines()]
    return [
        shlex.split(line, comments=True)[len(program.split()) :]
        for line in lines
        if line.startswith(f"{program} ")
    ]
