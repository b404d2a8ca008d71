"""The blocks of the pages, so that tests can run them as they stand there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
FENCED = re.compile(r"(?:<!-- run: ([^>]+) -->\n)?```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page):
    """(name or "", language, text) of each block; `<!-- run: NAME -->` before it names it."""
    return FENCED.findall(Path(page).read_text(encoding="utf-8"))


def snippet(page, name):
    """The block of that name, compiled if it is Python."""
    page = ROOT / "docs" / page
    (found,) = [block for block in blocks(page) if block[0] == name]
    return compile(found[2], f"{page.name}: {name}", "exec") if found[1] == "python" else found[2]


def commands(page, program="decaylab"):
    """The command lines of a page, without their comments and the program's name, as words."""
    import shlex

    lines = [line for _, _, text in blocks(page) for line in text.splitlines()]
    return [
        shlex.split(line, comments=True)[len(program.split()) :]
        for line in lines
        if line.startswith(f"{program} ")
    ]
