"""From the paper's tables and figures to run specs: artefact + tier + seeds -> cells.

An artefact is one table or figure (`artefacts/*.toml`); a cell is one number or curve in it, with
its key columns and one run per seed. The same run has the same id in every artefact, so that it is
trained once; what is measured in it (`probes`) is not part of the id.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from decaylab.errors import (
    AT_LEAST_ONE,
    BadValue,
    Failed,
    Lacks,
    Misplaced,
    NameTaken,
    NotRead,
    check_name,
    naming,
)
from decaylab.paper.settings import (
    ROW,
    SCHEMES,
    Searched,
    decay_kind,
    full_schedule,
    published,
    searched,
    searches_stamp,
    table,
)
from decaylab.paper.tiers import Tier, sized, tier_of
from decaylab.training import RunSpec

PROBES: dict[str, str] = {
    "effective_lr": "effective_lr/",
    "traces": "gn_trace_normalised_train/",
    "jacobian": "jacobian_norm",
    "jacobian_course": "jacobian_norm_2000",
    "train_pass": "train/pass_loss",
    "running_variance": "running_variance_least",
    "kfac_gn": "kfac_gn_norm",
    "damping": "second_order_share/",
}
"""What an artefact can ask for beyond what every run records -> how its rows begin."""
OF_FIGURE_5 = "scatter"  # three quantities, two by two
KINDS = ("table", "bars", "curves", OF_FIGURE_5)
SCALED_LR = "lr scaled by the square root of the batch, not searched"
COLUMNS = (
    *(*ROW, "hidden", "batch_size", "constant_lr", "weight_decay", "scheme"),
    *("lr", "precision", "batch_norm_eps", "loop", "epochs"),
)
"""What decides the runs of a cell; the last five in the place of the published settings.

(On digits the precision is always float32. `loop` is "ours" or "authors": `AUTHORS_LOOP`. `epochs`
are the first ones of a run, at a constant lr, whatever the tier.)
"""
AUTHORS_LOOP = {"keep_last_batch": True, "lr_drop_steps": 16_000, "late_refresh": True}
"""What the authors' code does otherwise under K-FAC (docs/recipe.md), as fields of a spec."""


@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper.

    Attributes:
        name: `table1` ... `fig9`.
        title: what it is, in a line.
        shows: what the paper's table or figure shows, in a sentence.
        kind: `table`, `bars`, `curves` or `scatter`.
        keys: the columns that tell its cells apart; the last one varies fastest and is the
            comparison (with and without decay, or the scheme).
        metric: the row name of the cell's value, at the end or as a series.
        percent: whether the value is shown times 100.
        probes: what its runs must record, names of `PROBES`.
    """

    name: str
    title: str
    shows: str
    kind: str
    keys: tuple[str, ...]
    metric: str
    percent: bool
    probes: tuple[str, ...]
    blocks: tuple[Mapping[str, Any], ...] = field(repr=False, default=())
    reference: str = ""


@dataclass(frozen=True)
class Cell:
    """One number or curve of an artefact.

    Attributes:
        artefact: its artefact's name.
        key: the artefact's key columns, as the paper has them (also where digits stand in).
        columns: all columns that decide its runs.
        runs: one spec per seed, 0 first; empty while `missing` says why there are none.
        sources: the runs, one per seed, whose norms these take over (recipe line 16).
        paper: the paper's number, None if it prints none.
        probes: what these runs must record.
        missing: why there is no run: a search that has not been made.
        note: where the settings come from, if not from the published ones.
        searched: the fields that a search tried several values of, for these settings.
        searched_runs: tables of accuracies: one spec per seed at the settings that our own search
            on held-out images found, where there is one and it differs from those of `runs`. A
            second value, shown beside that of `runs` and marked; no claim is judged by it.
        searched_edges: of these, the fields that lie on the edge of what the search tried.
    """

    artefact: str
    key: Mapping[str, Any]
    columns: Mapping[str, Any] = field(default_factory=dict, repr=False)
    runs: tuple[RunSpec, ...] = ()
    sources: tuple[RunSpec, ...] = ()
    paper: float | None = None
    probes: tuple[str, ...] = ()
    missing: str = ""
    note: str = ""
    searched: tuple[str, ...] = ()
    searched_runs: tuple[RunSpec, ...] = ()
    searched_edges: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The key in one line: `dataset=cifar10 network=vgg16 ...`."""
        return " ".join(f"{name}={value}" for name, value in self.key.items())


@cache
def artefacts() -> dict[str, Artefact]:
    """All artefacts, in the order they are run: Table 1 first, since most share its runs."""
    numbered = []
    for entry in resources.files("decaylab.paper").joinpath("artefacts").iterdir():
        if entry.name.endswith(".toml"):
            values = tomllib.loads(entry.read_text(encoding="utf-8"))
            name = entry.name.removesuffix(".toml")
            numbered.append((values.pop("order"), _artefact(name, values)))
    return {artefact.name: artefact for _, artefact in sorted(numbered, key=lambda pair: pair[0])}


def register_artefact(path: str | Path) -> Artefact:
    """Make a TOML file of one's own an artefact, named as the file: run and reported as the others.

    It has the fields of `Artefact` (`order`, `reference` and `probes` may be left out) and
    `[[cells]]`, of which every combination of listed values is a cell. Cells are of Table 1's
    data sets, networks and optimizers, whose settings are known.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise NotRead(path, error, "give a TOML file") from error
    if path.stem in (*artefacts(), "all"):
        raise NameTaken("artefact", path.stem)
    values.pop("order", None)
    with naming(path):
        if values.get("kind") == OF_FIGURE_5:
            raise Misplaced([f"kind {OF_FIGURE_5}"], "fig5", "choose table, bars or curves")
        try:
            artefact = _artefact(path.stem, values)
        except (TypeError, ValueError) as error:
            raise Failed("reading it as an artefact", error, "see docs/extend.md") from error
    artefacts()[artefact.name] = artefact
    return artefact


def artefact_of(name: str) -> Artefact:
    """An artefact by name; an error that lists the known ones."""
    known = artefacts()
    check_name("artefact", name, [*known, "all"])
    return known[name]


def cells(
    name: str, tier: str, seeds: int = 1, *, searched_folder: Path | None = None
) -> list[Cell]:
    """The cells of an artefact at a tier, in the paper's order, with `seeds` runs each.

    >>> [cell.key["weight_decay"] for cell in cells("table1", "short")[:2]]
    [0, 1]
    >>> cells("table1", "short")[0].runs[0].epochs, cells("table1", "full")[0].runs[0].epochs
    (40, 200)
    """
    artefact, size = artefact_of(name), tier_of(tier)
    AT_LEAST_ONE.check("seeds", seeds)
    key = (id(artefact), id(size), seeds, searched_folder, searches_stamp(searched_folder))
    if key not in _MADE:
        made = tuple(_cells(artefact, size, seeds, searched_folder))
        _MADE[key] = (artefact, size, made)
    return list(_MADE[key][2])


_MADE: dict[tuple[object, ...], tuple[Artefact, Tier, tuple[Cell, ...]]] = {}
"""The cells that were made already; a report asks for the same ones many times.

With the artefact and the tier, so that the `id` of each stays its own.
"""


def _cells(artefact: Artefact, tier: Tier, seeds: int, folder: Path | None) -> Iterator[Cell]:
    for block in artefact.blocks:
        for full_key in _expanded(block):
            key = {column: full_key[column] for column in artefact.keys if column in full_key}
            yield Cell(
                artefact.name,
                key,
                full_key,
                paper=_paper_number(artefact, key),
                probes=artefact.probes,
                **_runs(full_key, tier, seeds, folder),
                **_searched_runs(artefact, full_key, tier, seeds, folder),
            )


def select(selected: Iterable[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells that match every `key=value`; `key=a,b` takes both. Cells without the key stay out.

    >>> len(select(cells("table1", "short"), ["network=vgg16", "dataset=cifar10"]))
    24
    """
    selected = list(selected)
    for condition in only:
        name, equals, value = condition.partition("=")
        keys = dict.fromkeys(key for cell in selected for key in cell.key)
        if not equals:
            raise BadValue("--only", condition, "KEY=VALUE")
        check_name("key of these cells", name, keys)
        known = {str(cell.key[name]) for cell in selected if name in cell.key}
        wanted = value.split(",")
        for choice in wanted:
            check_name(f"{name} of these cells", choice, sorted(known))
        selected = [cell for cell in selected if str(cell.key.get(name, "")) in wanted]
    return selected


def _artefact(name: str, values: dict[str, Any]) -> Artefact:
    """An artefact from its file; a TypeError or ValueError where fields or columns are wrong."""
    fixed = values.pop("fixed", {})
    blocks = tuple({**fixed, **block} for block in values.pop("cells", ()))
    lists: dict[str, Any] = {key: tuple(values.pop(key, ())) for key in ("keys", "probes")}
    artefact = Artefact(name=name, blocks=blocks, **lists, **values)
    columns = {column for block in blocks for column in block}
    if not blocks or not artefact.keys:
        raise ValueError("it needs [[cells]], and keys that tell them apart")
    for what, given, known in (
        ("kind", [artefact.kind], KINDS),
        ("probe", artefact.probes, PROBES),
        ("column", columns, COLUMNS),
        ("key without a column", artefact.keys, columns),
    ):
        for each in given:
            check_name(what, each, sorted(known))
    if artefact.kind == "table" and artefact.keys[-1] not in ("weight_decay", "scheme"):
        raise BadValue("the last key of a table", artefact.keys[-1], "weight_decay or scheme")
    if missing := [column for block in blocks for column in ROW if column not in block]:
        raise Lacks("a block of [[cells]]", missing[0], "give each block all columns")
    return artefact


def _expanded(block: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Every combination of the listed values; the last column varies fastest."""
    choices = [value if isinstance(value, list) else [value] for value in block.values()]
    for combination in product(*choices):
        yield dict(zip(block, combination, strict=True))


def _scheme(key: Mapping[str, Any]) -> str:
    scheme = str(key.get("scheme", "wd" if key.get("weight_decay") else "none"))
    scheme = {"wd-all": "wd", "baseline": "none"}.get(scheme, scheme)
    check_name("scheme", scheme, SCHEMES)
    return scheme


def searched_cell(key: Mapping[str, Any], tier: Tier) -> dict[str, Any]:
    """The key a search is kept under: on digits, all data sets are one and nothing is augmented."""
    return {**key, "dataset": "digits", "augment": 0} if tier.on_digits else dict(key)


def search_command(cell: Cell, tier: str) -> str:
    """The command that searches the settings of a cell."""
    names = [name for name in (*ROW, "batch_size", "constant_lr") if name in cell.columns]
    key = {name: cell.columns[name] for name in names}
    chosen = " ".join(f"{n}={int(v) if isinstance(v, bool) else v}" for n, v in key.items())
    return f"decaylab search {chosen} --scheme {_scheme(cell.columns)} --tier {tier}"


def _runs(key: Mapping[str, Any], tier: Tier, seeds: int, folder: Path | None) -> dict[str, Any]:
    """The runs of a cell, or why there are none; and where the settings come from."""
    scheme, optimizer = _scheme(key), str(key["optimizer"])
    search, note, where = None, "", searched_cell(key, tier)
    if scheme == "l2" and optimizer != "sgd":  # for SGD, L2 is its weight decay
        search = searched(where, "l2", tier.searched, folder)
        if search is None:
            cell = " ".join(f"{n}={where[n]}" for n in (*ROW, "batch_size") if n in where)
            return {"missing": f"needs search: decaylab search {cell} --tier {tier.name}"}
    elif key.get("batch_size", 128) != 128:
        search = searched(where, scheme, tier.searched, folder)
        note = "" if search else SCALED_LR
    fields: tuple[str, ...] = ()
    if search is not None:
        note, fields = f"searched: {Path(search.path).name}", search.fields
    runs = _specs(key, scheme, tier, search, seeds)
    if "wn-conv" not in scheme:
        return {"runs": runs, "note": note, "searched": fields}
    sources = _specs(key, "wd", tier, None, seeds)
    taken = [replace(run, norm_source=source.id) for run, source in zip(runs, sources, strict=True)]
    return {"runs": tuple(taken), "sources": sources, "note": note}


def _searched_runs(
    artefact: Artefact, key: Mapping[str, Any], tier: Tier, seeds: int, folder: Path | None
) -> dict[str, Any]:
    """The runs at our own search's settings, for a cell whose `runs` are not of a search."""
    of_accuracies = artefact.kind == "table" and artefact.percent and artefact.reference
    if not of_accuracies or key.get("batch_size", 128) != 128:
        return {}
    scheme = _scheme(key)
    search = searched(searched_cell(key, tier), scheme, tier.searched, folder)
    if search is None:
        return {}
    ours = _specs(key, scheme, tier, search, seeds)
    same = ours == _specs(key, scheme, tier, None, seeds)
    return {} if same else {"searched_runs": ours, "searched_edges": search.edges}


def spec_for(key: Mapping[str, Any], scheme: str, tier: str) -> RunSpec:
    """The first run of a cell of Table 1 under a scheme, before any search."""
    size = tier_of(tier)
    if size.on_digits and key["dataset"] == "digits":
        key = {**key, "dataset": "cifar10"}  # whose cells they stand for, among others
    return _specs(key, scheme, size, None, seeds=1)[0]


def _specs(
    key: Mapping[str, Any], scheme: str, tier: Tier, search: Searched | None, seeds: int
) -> tuple[RunSpec, ...]:
    """A run per seed, at the published settings or those that a search found."""
    optimizer = str(key["optimizer"])
    row = published(key, decayed=scheme != "none")
    values = full_schedule(key, row) | _decay(scheme, optimizer, float(row["weight_decay"]))
    values = sized(values, tier) | ({} if search is None else dict(search.values))
    asked = ("batch_norm_eps",) if tier.on_digits else ("precision", "batch_norm_eps")
    values |= {name: key[name] for name in asked if name in key}
    if key.get("loop", "ours") == "authors":
        values |= AUTHORS_LOOP | {"lr_drop_steps": AUTHORS_LOOP["lr_drop_steps"] // tier.divide}
    if "lr" in key:  # on digits, whose learning rates are others: as many times the usual one
        times = key["lr"] / float(row["learning_rate"])
        values["lr"] = float(f"{values['lr'] * times:.3g}")
    if "epochs" in key:
        epochs = min(key["epochs"], values["epochs"])
        values |= {"epochs": epochs, "lr_drop_every": epochs}
    first = RunSpec.from_mapping(values)
    return tuple(replace(first, seed=seed) for seed in range(seeds))


def _decay(scheme: str, optimizer: str, weight_decay: float) -> dict[str, Any]:
    """The decay fields of a scheme (recipe line 16); the norm transfer is added by its source."""
    if scheme in ("none", "wn-conv", "undecayed"):
        return {"decay": "none", "weight_decay": 0.0}
    scope = "conv" if scheme == "wd-conv" else "fc" if "wd-fc" in scheme else "all"
    kind = "l2" if scheme == "l2" else decay_kind(optimizer)
    return {"decay": kind, "weight_decay": weight_decay, "decay_scope": scope}


def _paper_number(artefact: Artefact, key: Mapping[str, Any]) -> float | None:
    """The number the paper prints for a cell."""
    for row in table(f"reference/{artefact.reference}") if artefact.reference else ():
        *names, value = row
        if all(str(key.get(name)) == row[name] for name in names):
            return float(row[value])
    return None
