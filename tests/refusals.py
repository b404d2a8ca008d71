"""Errors compared by type and fields: their words are tested in `test_errors.py` alone."""

import pytest
from typer.testing import CliRunner


def refuses(kind, /, **fields):
    """`pytest.raises` for an error of that type whose fields have these values."""
    return pytest.raises(kind, check=lambda error: fields.items() <= vars(error).items())


def refused(*words):
    """The error that ends a command line, with exit code 2 and one line on stderr."""
    from decaylab.cli import app

    words = list(map(str, words))
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 2, ended.output
    assert ended.stderr.count("\n") == 1, ended.stderr
    return CliRunner().invoke(app, [*words, "--debug"]).exception
