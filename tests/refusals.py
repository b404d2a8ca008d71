"""Errors compared by type and fields: their words are tested in `test_errors.py` alone."""

import pytest
from typer.testing import CliRunner


def refuses(kind, /, **fields):
    """`pytest.raises` for an error of that type whose fields have these values."""
    return pytest.raises(kind, check=lambda error: fields.items() <= vars(error).items())


def refused(*words):
    """The error that ends a command line."""
    from decaylab.cli import app

    return CliRunner().invoke(app, [*map(str, words), "--debug"]).exception
