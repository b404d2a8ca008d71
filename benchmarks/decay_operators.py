"""What the weight decay of every optimizer of torch, pytorch_optimizer and schedulefree does.

    python benchmarks/decay_operators.py                       # prints the tables
    python benchmarks/decay_operators.py --page docs/decay-operators.md   # writes them into a page

Each class is audited as it comes, with its own settings (`decaylab.audit_decay`); a few minutes on
a CPU. What is between the marks `<!-- decay operators -->` and `<!-- end -->` is written anew.
"""

import argparse
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from decaylab import DecaylabError, audit_decay
from decaylab.audits import DecayAudit

BEGIN, END = "<!-- decay operators -->", "<!-- end -->"
# What some need besides parameters; a key of a group is given to all groups.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "bsam": {"num_data": 100},
    "ranger21": {"num_iterations": 1000},
}
USES_MUON = ("adago", "adamuon", "muon", "muonclip", "normuon")
# They need more than gradients: second derivatives, the model, several processes.
LEFT_OUT = {"adahessian", "sophiah", "adalomo", "lomo", "adammini", "demo", "distributedmuon"}


def from_torch() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every optimizer of torch.optim."""
    for name, kind in sorted(vars(torch.optim).items()):
        if (
            inspect.isclass(kind)
            and issubclass(kind, torch.optim.Optimizer)
            and name != "Optimizer"
        ):
            yield name, kind


def from_schedulefree() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Those of `schedulefree` that people use."""
    import schedulefree

    for name in ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"):
        yield name, getattr(schedulefree, name)


def from_pytorch_optimizer() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every optimizer that pytorch_optimizer can load by name."""
    import pytorch_optimizer

    for name in sorted(pytorch_optimizer.get_supported_optimizers()):
        if name in LEFT_OUT:
            continue
        try:
            kind = pytorch_optimizer.load_optimizer(name)
        except Exception as error:  # of a package that is not installed
            print(f"{name}: not loaded ({error})", file=sys.stderr)
            continue
        yield kind.__name__, adapted(name, kind)


def adapted(name: str, kind: type) -> Callable[..., Any]:
    """The class, or a function that gives it what it needs besides parameters."""
    if name not in ARGUMENTS and name not in USES_MUON:
        return kind

    def build(params: list[dict[str, Any]], lr: float, weight_decay: float) -> Any:
        flags = {"use_muon": True} if name in USES_MUON else {}
        groups = [{**group, **flags} for group in params]
        return kind(groups, lr=lr, weight_decay=weight_decay, **ARGUMENTS.get(name, {}))

    return build


def audited(factory: Callable[..., Any]) -> DecayAudit | str:
    """The audit, or why there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return audit_decay(factory)
        except DecaylabError as error:
            return str(error)


def row(name: str, result: DecayAudit | str) -> str:
    """One line of a table."""
    if isinstance(result, str):
        return f"| {name} | not tried | | {result.replace('|', '/')[:90]} |"
    operator = result.operator
    times = ""
    if operator.times is not None:
        least, most = operator.times
        times = f"{least:.2g}-{most:.2g}" if operator.factor is None else f"{operator.factor:.3g}"
    routine = ("operator", "times")
    notes = [
        f"**{check.name}: {check.words}**"
        if check.passed is False
        else f"{check.name}: {check.words}"
        for check in result.checks
        if check.passed is not True and (check.name not in routine or check.passed is False)
    ]
    if operator.kind == "unknown":
        notes.insert(0, result["operator"].words)
    return f"| {name} | {operator.kind} | {times} | {'; '.join(notes).replace('|W|', 'W')} |"


def tables() -> str:
    """A section for each library."""
    parts = []
    for package, optimizers in (
        ("torch", from_torch),
        ("schedulefree", from_schedulefree),
        ("pytorch_optimizer", from_pytorch_optimizer),
    ):
        rows = []
        for name, factory in optimizers():
            rows.append(row(name, audited(factory)))
            print(rows[-1], file=sys.stderr, flush=True)
        number = version(package).split("+")[0]
        parts += [f"## {package} {number}", "", "| class | operator | times | notes |"]
        parts += ["|---|---|---|---|", *rows, ""]
    return "\n".join(parts)


def main() -> None:
    """Print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="a Markdown file with the two marks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = tables()
    if args.page is None:
        print(text)
        return
    page = args.page.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    args.page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
