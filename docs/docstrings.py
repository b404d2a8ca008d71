"""A griffe extension: our docstrings are plain text with doctests, the reference is Markdown."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^[ \t]*>>> .*\n?(?:^[ \t]*\S.*\n?)*)", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Doctests become blocks of code; brackets are shapes, not links."""
    parts, end = [], 0
    for example in DOCTEST.finditer(text):
        parts += [_plain(text[end : example.start()]), f"```pycon\n{example[0].rstrip()}\n```\n"]
        end = example.end()
    return "".join([*parts, _plain(text[end:])]).rstrip()


def _plain(text: str) -> str:
    """Shapes side by side, `[N, C] [C]`, would be a link to `C`."""
    return re.sub(r"\]( ?)\[", r"]\1\\[", text)


class Docstrings(griffe.Extension):
    """Rewrites every docstring as it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """One function, class or module."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
