"""`decaylab audit MODULE:NAME`: is an optimizer's step that of the curvature block?"""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from decaylab.audits import Audit, audit
from decaylab.cli import options
from decaylab.cli.options import option
from decaylab.cli.terminal import print_json, say, show
from decaylab.errors import BadValue, Failed, Lacks, did_you_mean
from decaylab.text_table import Column, Styled, TextTable

Optimizer = Annotated[
    str, typer.Argument(metavar="MODULE:NAME", help="A function that builds the optimizer.")
]
Curvature = Annotated[
    str | None, option("--curvature", "Require fisher, gauss-newton or empirical-fisher.")
]
Damping = Annotated[
    float | None, option("--damping", "Damping lambda, if it is not in the optimizer.")
]
Scale = Annotated[float, option("--curvature-scale", "Intended factor on the curvature.")]
Steps = Annotated[int, option("--steps", "Steps from the same weights; the last one counts.")]
MARKS = {True: Styled("ok", "green"), False: Styled("WRONG", "bold red"), None: Styled("-", "dim")}


def audit_command(
    optimizer: Optimizer,
    curvature: Curvature = None,
    damping: Damping = None,
    curvature_scale: Scale = 1.0,
    steps: Steps = 20,
    json_output: options.Json = False,
) -> None:
    """Compare a K-FAC-like optimizer's steps with the exact curvature block.

    MODULE:NAME is a function that takes a model and returns the optimizer, built without weight
    decay, clipping or scaled steps (for decaylab's KFAC: step_scaling="none"). The module may be in
    the current folder. If the scale is wrong, the audit names the power of the batch size or of the
    positions that is off. Takes seconds on a CPU. Exits with 1 if a check fails.
    """
    factory = imported(optimizer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the nets are tiny: threads would only wait for each other
    try:
        result = audit(
            factory,
            curvature=curvature,
            damping=damping,
            curvature_scale=curvature_scale,
            steps=steps,
        )
    finally:
        torch.set_num_threads(threads)
    if json_output:
        print_json(result.as_dict())
    else:
        say(result.title)
        show(_table(result))
        say(result.summary)
    if not result.passed:
        raise typer.Exit(1)


def imported(name: str) -> Any:
    """The object that MODULE:NAME means; the working directory is searched as Python would."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise BadValue("what to audit", name, "MODULE:NAME, as in my_optimizers:kfac")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        namespace = importlib.import_module(module)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and module.startswith(error.name or " ")
        remedy = "run the command where `import` finds it" if missing else f"fix {module} first"
        raise Failed(f"importing {module}", error, remedy) from error
    factory = getattr(namespace, attribute, None)
    if not callable(factory):
        near = did_you_mean(attribute, vars(namespace))
        remedy = f"give the name of one that builds an optimizer{near}"
        raise Lacks(module, f"function {attribute!r}", remedy)
    return factory


def _table(result: Audit) -> TextTable:
    columns = (Column(""), Column("what"), Column("found", words=True))
    rows = [(MARKS[check.passed], check.name, check.words) for check in result.checks]
    return TextTable(columns, rows)
