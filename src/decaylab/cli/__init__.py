"""The command `decaylab`."""

import errno
import io
import sys
import traceback
import warnings
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from decaylab import __version__
from decaylab.cli import advise, demo, runs, sweep
from decaylab.cli.attribute import attribute_command
from decaylab.cli.audit import audit_command
from decaylab.cli.claims import claims_command
from decaylab.cli.compare import compare_command
from decaylab.cli.data import data_app
from decaylab.cli.decay import audit_decay_command, decay_table_command
from decaylab.cli.diagnose import SeveralAgainst, diagnose_command
from decaylab.cli.live import live_command
from decaylab.cli.options import option
from decaylab.cli.probe import probe_command
from decaylab.cli.report import report_command
from decaylab.cli.reproduce import reproduce_command
from decaylab.cli.search import search_command
from decaylab.cli.terminal import warn
from decaylab.cli.theory import theory_command
from decaylab.cli.train import train_command
from decaylab.errors import DecaylabError, DecaylabWarning, printable
from decaylab.training import Interrupted, world

_shown_by_python = warnings.showwarning


class _Commands(TyperGroup):
    """An error that a user can fix is one line on stderr; `--debug` shows the traceback."""

    debug = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.debug = "--debug" in args  # anywhere in the command line
        _flags_without_type(self, ctx)
        return super().parse_args(ctx, [word for word in args if word != "--debug"])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (DecaylabError, Interrupted) as error:
            if self.debug:
                raise
            if isinstance(error, Interrupted):
                warn(f"{error}: run the same command again to continue")
            else:
                warn(f"error: {error}")
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            if self.debug or error.errno in (None, errno.EPIPE):  # `| head` may close the pipe
                raise
            warn(f"error: {error.strerror}{_short_name(error.filename)}: --debug shows where")
            raise typer.Exit(DecaylabError.exit_code) from None


def _short_name(path: object) -> str:
    """A file for a sentence, if there is one: the end of its name, if that is long."""
    text = "" if path is None else printable(str(path))
    return f", {text if len(text) <= 80 else f'...{text[-60:]}'}" if text else ""


def _flags_without_type(command: Any, ctx: Any) -> None:
    """Help shows a flag as a flag: `--json`, not `--json <bool>`."""
    for parameter in command.get_params(ctx):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _flags_without_type(inner, ctx)


app = typer.Typer(
    cls=_Commands,
    help="Measure what weight decay does to a network.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # else help keeps the line breaks of a docstring
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        print(f"decaylab {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[bool, option("--debug", "Show errors with their traceback.")] = False,
) -> None:
    """Measure what weight decay does to a network."""


OWN, TRAIN, PAPER = "Your training", "Train and search", "The paper"
app.command("live", rich_help_panel=OWN)(live_command)
app.command("diagnose", cls=SeveralAgainst, rich_help_panel=OWN)(diagnose_command)
app.add_typer(advise.app, name="advise", rich_help_panel=OWN)
app.command("decay-table", rich_help_panel=OWN)(decay_table_command)
app.command("audit-decay", rich_help_panel=OWN)(audit_decay_command)
app.command("audit", rich_help_panel=OWN)(audit_command)
app.command("train", rich_help_panel=TRAIN)(train_command)
app.command("search", rich_help_panel=TRAIN)(search_command)
app.command("attribute", rich_help_panel=TRAIN)(attribute_command)
app.command("compare", rich_help_panel=TRAIN)(compare_command)
app.command("probe", rich_help_panel=TRAIN)(probe_command)
app.add_typer(runs.app, name="runs", rich_help_panel=TRAIN)
app.add_typer(sweep.app, name="sweep", rich_help_panel=TRAIN)
app.add_typer(data_app, name="data", rich_help_panel=TRAIN)
app.command("demo", rich_help_panel=PAPER)(demo.demo_command)
app.command("theory", rich_help_panel=PAPER)(theory_command)
app.command("reproduce", rich_help_panel=PAPER)(reproduce_command)
app.command("claims", rich_help_panel=PAPER)(claims_command)
app.command("report", rich_help_panel=PAPER)(report_command)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning of our own as a sentence, any other with the line that gave it."""
    if issubclass(category, DecaylabWarning):
        warn(f"warning: {message}")
    else:
        _shown_by_python(message, category, filename, lineno, file, line)


def main() -> None:
    """Run the command line."""
    warnings.showwarning = _show_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an old locale may have no letter for a curve
            stream.reconfigure(errors="replace")
    if not world.launched():
        app(prog_name="decaylab")
        return
    code = 1
    try:
        app(prog_name="decaylab")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:
        traceback.print_exc()
    else:
        code = 0
    world.leave(code)
