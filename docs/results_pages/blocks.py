"""Named blocks of Markdown made from records, and pages that are kept up to date with them.

A page asks for a block by `<!-- results: NAME -->` and `<!-- end -->`; what stands between is
written by `refresh` and by nobody else, so that a page in a repository shows what the records say.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from decaylab.document import grid_markdown, text_grid
from decaylab.errors import DecaylabError, check_name
from decaylab.paper import TIERS, Cell
from decaylab.paper.claims import CLAIMS, Claim
from decaylab.paper.finished_runs import FinishedRun
from decaylab.paper.further_seeds import NEAR
from decaylab.paper.superseded import superseded as superseded_why
from decaylab.records.files import replace_text
from decaylab.report.figures import groups, label_of
from decaylab.report.names import key_title, named, percent
from decaylab.report.sections import Filled
from decaylab.report.tables import (
    Entry,
    OverSeeds,
    Pair,
    change,
    change_words,
    legend,
    number,
    pairs,
    to_grid,
    with_runs,
)
from decaylab.training import RunSpec
from results_pages.results import (
    Results,
    all_times,
    device_minutes,
    independent,
    rest,
    runs,
    variants,
)
from results_pages.searches import searches

BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
ADDED = ("undecayed",)  # schemes that a row is shown without, too


def table(results: Results, name: str) -> str:
    """A table of the paper beside ours, at each tier: the rows that have runs."""
    return _joined(_rows_at(results, name, tier, set()) for tier in results.tiers)


def _rows_at(results: Results, name: str, tier: str, shown: set[tuple[str, ...]]) -> str:
    """The rows of a table at a tier that have runs and are not among `shown`, which grows."""
    filled = results.filled(name, tier)
    assert filled.table is not None
    chosen = [pair for pair in with_runs(filled.table) if pair.key not in shown]
    if not chosen:
        return ""
    shown.update(pair.key for pair in chosen)
    runs = results.runs_of(filled.cells).values()
    devices = ", ".join(dict.fromkeys(run.manifest.device for run in runs))
    text = f"At {TIERS[tier].schedule} (tier {tier}), on {devices}:\n\n"
    notes = legend(filled.table)
    table = grid_markdown(to_grid(filled.table, chosen))
    return text + table + (f"\n{notes}\n" if notes else "")


def compared(results: Results, name: str) -> str:
    """A figure of test accuracies in numbers: a row for each net and optimizer, by scheme.

    Rows whose runs are all there, each another one (under SGD, L2 is weight decay).
    """
    return _joined(_by_scheme(results.filled(name, tier), results) for tier in results.tiers)


def _by_scheme(filled: Filled, results: Results) -> str:
    by_title: dict[str, dict[str, str]] = {}
    for title, group in groups(filled.cells, filled.artefact.keys[:-1]):
        needed = [cell for cell in group if cell.key.get("scheme") not in ADDED]
        seeds = [results.finished_runs.of_cell(cell) for cell in needed]
        if all(seeds) and len({runs[0].spec.id for runs in seeds}) == len(needed):
            for cell in group:
                values = results.finished_runs.values(cell.runs, filled.artefact.metric)
                shown = OverSeeds(tuple(100 * value for value in values)).short()
                by_title.setdefault(title, {})[label_of(cell)] = shown
    labels = list(dict.fromkeys(label for row in by_title.values() for label in row))
    rows = [[title, *(row.get(name, "—") for name in labels)] for title, row in by_title.items()]
    text = f"At {TIERS[filled.tier].schedule} (tier {filled.tier}):\n\n"
    return text + text_grid(["cell", *labels], rows) if rows else ""


def misses(results: Results) -> str:
    """How many cells of Table 1 are near the paper's at tier full, and which are not.

    By seed 0, as the paper has one seed: others stand beside it and never in its place.
    """
    if "full" not in results.tiers:
        return "*No cell of Table 1 has been run at tier full yet.*\n"
    filled = results.filled("table1", "full")
    assert filled.table is not None
    entries = [entry for entry in filled.table.entries if entry.first is not None]
    near = [entry for entry in entries if _distance(entry, entry.first) <= NEAR]
    marked = [
        e
        for e in entries
        if e not in near and e.searched.n and _distance(e, e.searched.mean) <= NEAR
    ]
    text = f"{len(near)} of the {len(entries)} cells that were run at tier full are within"
    text += f" {NEAR:g} point of the paper at seed 0 and the published settings"
    text += f", {len(marked)} more at those of our own search (‡)." if marked else "."
    firsts = [results.finished_runs.of(cell.runs[0]) for cell in filled.cells if cell.runs]
    if old := sum(run is not None and bool(run.superseded) for run in firsts):
        were = "was" if old == 1 else "were"
        text += f" {old} of the {len(entries)} {were} made before a fix of the numerics and will be"
        text += " made again."
    wrong = [pair for pair in pairs(filled.table) if _other_order(pair)]
    by_column = filled.table.by_column
    text += "\n" + "".join(
        f"\nThe order with and without decay is not the paper's: {key_title(by_column(pair.key))}"
        f" ({pair.words('difference')} points, the paper's"
        f" {pair.effect('difference', paper=True):+.2f}).\n"
        for pair in wrong
    )
    header = ["cell", "decay", "paper", "seed 0", "seed 0 − paper", "‡", "‡ − paper", "seeds"]
    rows = [
        [
            *(key_title(by_column(entry.key)), "yes" if entry.decayed else "no"),
            number(entry.paper),
            *(number(entry.first), _signed(entry.paper, entry.first)),
            *(entry.searched.short(), _signed(entry.paper, entry.searched.mean)),
            f"{entry.ours.n}: {entry.ours.short()}" if entry.ours.n > 1 else "1",
        ]
        for entry in entries
        if entry not in near
    ]
    return f"{text}\n{text_grid(header, rows)}" if rows else text


def _distance(entry: Entry, ours: float | None) -> float:
    difference = change(entry.paper, ours, "difference")
    return abs(difference) if difference is not None else 0.0


def _other_order(pair: Pair) -> bool:
    """Whether the sign of decay's effect is not the paper's, where that is over half a point."""
    ours, paper = (pair.effect("difference", paper=papers) for papers in (False, True))
    return ours is not None and paper is not None and abs(paper) > 0.5 and ours * paper <= 0


def _signed(paper: float | None, ours: float | None) -> str:
    return change_words(change(paper, ours, "difference"), "difference")


def first_order(results: Results) -> str:
    """SGD and Adam with decay under BN: the last epoch and the best one, at every setting run."""
    rows = []
    for tier in results.tiers:
        for cell in results.filled("table1", tier).cells:
            first = cell.key["optimizer"] in ("sgd", "adam")
            if first and cell.key["batch_norm"] and cell.key["weight_decay"]:
                rows += _last_and_best(results, cell, cell.runs, (tier, "published"))
                rows += _last_and_best(results, cell, cell.searched_runs, (tier, "our search"))
    header = ["cell", "tier", "settings", "seed", "lr", "decay", "paper", *ENDING]
    return text_grid(header, rows) if rows else "*No such cell has been run yet.*\n"


def _last_and_best(
    results: Results, cell: Cell, specs: Sequence[RunSpec], labels: tuple[str, str]
) -> list[list[str]]:
    return [
        [
            key_title(cell.key, list(cell.key)[:-1]),
            *(*labels, str(run.spec.seed), f"{run.spec.lr:g}", f"{run.spec.weight_decay:g}"),
            *(number(cell.paper), *_ending(run)),
        ]
        for run in _with_a_curve(results, specs)
    ]


def _with_a_curve(results: Results, specs: Sequence[RunSpec]) -> list[FinishedRun]:
    runs = filter(None, map(results.finished_runs.of, specs))
    return [run for run in runs if run.curve("test/accuracy")]


ENDING = ["last epoch", "best epoch", "at epoch", "training accuracy"]


def _ending(run: FinishedRun) -> list[str]:
    """Test accuracy at the end and at its best, and when; training accuracy at the end."""
    curve = run.curve("test/accuracy")
    epoch, best = max(curve, key=lambda point: point[1])
    last, fitted = curve[-1][1], run.final("train/accuracy")
    return [percent(last), percent(best), str(epoch), percent(fitted)]


def each_run(results: Results, name: str, finals: Mapping[str, str]) -> str:
    """Each run of a figure of our own, and what it ended with; `finals` by recorded name."""
    rows = []
    for tier in results.tiers:
        for cell in results.filled(name, tier).cells:
            rows += [
                [
                    *(f"`{run.spec.id.rpartition('-')[2]}`", tier, key_title(cell.key)),
                    *(str(run.spec.seed), *_ending(run)),
                    *(number(run.final(quantity)) for quantity in finals),
                ]
                for run in _with_a_curve(results, cell.runs)
            ]
    header = ["run", "tier", "cell", "seed", *ENDING, *finals.values()]
    return text_grid(header, rows) if rows else "*No runs yet.*\n"


def claims(results: Results) -> str:
    """E1-E17: the verdict at each tier."""
    judgements = {tier: results.claims(tier) for tier in results.tiers}
    if not judgements:
        return "*No runs yet.*\n"
    rows = []
    for name, claim in next(iter(judgements.values())).items():
        verdicts = [by_id[name].status_by_part for by_id in judgements.values()]
        rows.append([name, claim.where, claim.claim, *verdicts])
    header = ["", "where", "claim", *(f"tier {tier}" for tier in judgements)]
    return text_grid(header, rows)


def explained(results: Results) -> str:
    """Each verdict in two sentences: what was seen, and what that makes of the claim."""
    lines = []
    for name in CLAIMS:
        for tier in results.tiers:
            claim = results.claims(tier)[name]
            if claim.status != "not run":
                lines.append(f"- **{name}, tier {tier}: {claim.status_by_part}.** {because(claim)}")
    return "\n".join(lines) + "\n" if lines else "*No runs yet.*\n"


WHY_CONTRADICTED: dict[tuple[str, ...], str] = {
    ("E8", "vgg16"): "The number that is off is the norm of VGG16 under SGD without decay. It"
    " depends on the learning rate, and the paper does not say with which one the networks of its"
    " Table 2 were trained",
    ("E10", "without decay"): "The paper does not say whether its run has decay. Ours does what the"
    " sentence says with decay and does not without it, and the rule, which was fixed before, asks"
    " for both",
    ("E12", "1e-4 within 10 epochs"): "The settings are those with the lowest loss at epoch 10, a"
    " criterion that was fixed before, and from there on the loss falls slowly. At Table 1's batch"
    " size of 128, K-FAC-G is there in time",
    ("E16", "in epochs", "in wall-clock time"): "This is at batch size 640, with settings chosen by"
    " the loss at epoch 10. At Table 1's batch size of 128, K-FAC-G is far ahead",
}
"""What to know about a claim that the records contradict in this part and in no other.

No numbers: those are recorded.
"""


def because(claim: Claim) -> str:
    """What was seen, and what that makes of a claim, in two or three sentences."""
    seen = f"Seen: {claim.effect}" if claim.effect else "Nothing was seen"
    without_runs, without_schedule = claim.lacking
    if claim.verdict == "contradicted":
        reason = f"Against the claim: {'; '.join(claim.against)}"
        if why := WHY_CONTRADICTED.get((claim.id, *_contradicted_parts(claim))):
            reason += f". {why}"
    elif claim.verdict == "supported":
        reason = "Nothing it needs is missing, and nothing is against it"
    elif without_runs:
        reason = f"Comparisons that lack runs: {without_runs}"
    elif claim.verdict == "not enough schedule":
        reason = f"Comparisons on too short a schedule: {without_schedule}"
    else:
        reason = "All runs are there; what they show is neither clearly for it nor against it"
    return f"{seen}. {reason}."


def rules(results: Results) -> str:
    """How each claim is judged, beside the paper's sentence."""
    rows = [
        [name, rule.where, rule.sentence, rule.supported, rule.contradicted]
        for name, rule in CLAIMS.items()
    ]
    header = ["", "where", "the paper's sentence", "supported where", "contradicted where"]
    return text_grid(header, rows)


def superseded(results: Results) -> str:
    """Runs made before a fix of the numerics: no verdict uses them."""
    by_reason: dict[str, list[str]] = {}
    for run in results.indexed:
        if why := superseded_why(run.manifest):
            by_reason.setdefault(why, []).append(f"`{run.manifest.id}` ({run.manifest.tier})")
    rows = [[f"{why[:1].upper()}{why[1:]}", ", ".join(runs)] for why, runs in by_reason.items()]
    return text_grid(["what was wrong", "runs"], rows) if rows else "*There are none.*\n"


def verdicts(results: Results) -> str:
    """How many of the claims are supported, contradicted and open, in a sentence per tier."""
    lines = []
    for tier in results.tiers:
        by_id = results.claims(tier)
        counts: dict[str, list[str]] = {}
        for claim in by_id.values():
            counts.setdefault(claim.status, []).append(claim.id)
        parts = [f"{len(ids)} {verdict} ({', '.join(ids)})" for verdict, ids in counts.items()]
        effect = by_id["E1"].effect
        effect_sentence = f" {effect[:1].upper()}{effect[1:]}." if effect else ""
        lines.append(f"- Tier {tier}: {'; '.join(parts)}.{effect_sentence}\n")
    return "".join(lines) or "*No runs yet.*\n"


SETTLED = ("supported", "contradicted", "undecided")  # every run is there that it takes


def decided(results: Results) -> dict[str, Claim]:
    """Each claim at the fullest tier that settles it; where none does, at the fullest with runs."""
    judgements = [results.claims(tier) for tier in results.tiers]
    chosen = {}
    for name in CLAIMS:
        claims = [judgement[name] for judgement in judgements]
        settled = [claim for claim in claims if claim.verdict in SETTLED]
        run = [claim for claim in claims if claim.status != "not run"]
        chosen[name] = (settled or run or claims)[0]
    return chosen


def report_summary(results: Results) -> str:
    """What came out, in three lines."""
    if not results.tiers:
        return "*No runs yet.*\n"
    lines = [_counts(results)]
    if "full" in results.tiers:
        lines.append(f"Table 1: {misses(results).splitlines()[0]}")
        lines.append(f"Its pairs at that schedule: {results.claims('full')['E1'].effect}.")
    return "".join(f"- {line}\n" for line in lines)


def summary(results: Results) -> str:
    """What came out, in one line: for a README."""
    if "full" not in results.tiers:
        return "*No runs at the paper's schedule yet.*\n"
    return f"Table 1: {misses(results).splitlines()[0]} {_counts(results)}\n"


def _counts(results: Results) -> str:
    """How many claims the records support, contradict and leave open, and which, in a sentence."""
    by_verdict: dict[str, list[str]] = {"supported": [], "contradicted": [], "open": []}
    for claim in decided(results).values():
        by_verdict[_grouped(claim)].append(claim.id + _which_part(claim))
    counts = [
        f"{len(names)} {'is' if len(names) == 1 else 'are'} {verdict} ({', '.join(names)})"
        for verdict, names in by_verdict.items()
        if names
    ]
    return (
        f"Of the {len(CLAIMS)} empirical claims, each at the longest schedule that settles it,"
        f" {', '.join(counts)}."
    )


def _contradicted_parts(claim: Claim) -> list[str]:
    return [part for part, verdict in claim.parts.items() if verdict == "contradicted"]


def _which_part(claim: Claim) -> str:
    """Of a claim that is contradicted in some of its parts: in which."""
    parts = _contradicted_parts(claim)
    several = claim.verdict == "contradicted" and len(parts) < len(claim.parts)
    return f": {' and '.join(named(part) for part in parts)}" if several else ""


def report_scope(results: Results) -> str:
    """The claims, what came of each, and at which schedule."""
    if not results.tiers:
        return "*No runs yet.*\n"
    rows = [
        [name, claim.where, claim.claim, claim.status_by_part, TIERS[claim.tier].schedule]
        for name, claim in decided(results).items()
    ]
    return text_grid(["", "where", "claim", "verdict", "judged at"], rows)


def report_claims(results: Results, verdict: str) -> str:
    """The claims of which this came, each with what was seen."""
    chosen = decided(results) if results.tiers else {}
    lines = [
        f"- **{claim.id}** ({claim.where}; {TIERS[claim.tier].schedule}): {claim.claim}."
        f" {because(claim)}\n"
        for claim in chosen.values()
        if _grouped(claim) == verdict
    ]
    return "".join(lines) or "*None.*\n"


def _grouped(claim: Claim) -> str:
    return claim.verdict if claim.verdict in ("supported", "contradicted") else "open"


def report_effort(results: Results) -> str:
    """How many runs there are, and how long they had a device."""
    times = all_times(results)
    if not times:
        return "*No runs yet.*\n"
    devices = ", ".join(dict.fromkeys(device for device, _ in times if device))
    return (
        f"{len(times)} runs, searches included, on {devices}; GPU-minutes: {device_minutes(times)}."
        f" What is left is listed [there](reproduction.md#how-to-run-the-rest).\n"
    )


def _joined(parts: Iterable[str]) -> str:
    return "\n".join(filter(None, parts)) or "*No runs yet.*\n"


BLOCKS: dict[str, Callable[[Results], str]] = {
    "table1": lambda results: table(results, "table1"),
    "table2": lambda results: table(results, "table2"),
    "table3": lambda results: table(results, "table3"),
    "fig1": lambda results: compared(results, "fig1"),
    "fig2": lambda results: compared(results, "fig2"),
    "fig4": lambda results: compared(results, "fig4"),
    "fig6": lambda results: compared(results, "fig6"),
    "jacobian-lr": lambda results: each_run(
        results,
        "jacobian-lr",
        {"jacobian_norm": "squared norm", "jacobian_norm_median": "its median over the images"},
    ),
    "adam-precision": lambda results: each_run(
        results, "adam-precision", {"test/loss": "test loss", "train/loss": "training loss"}
    ),
    "bursts": lambda results: each_run(results, "bursts", {}),
    "runs": runs,
    "rest": rest,
    "misses": misses,
    "first-order": first_order,
    "variants": variants,
    "searches": lambda results: searches(
        results.searched, results.searched_runs, results.root / "searched"
    ),
    "independent": independent,
    "claims": claims,
    "explained": explained,
    "rules": rules,
    "superseded": superseded,
    "verdicts": verdicts,
    "summary": summary,
    "report-summary": report_summary,
    "report-scope": report_scope,
    "report-effort": report_effort,
    "report-table1": lambda results: (
        _rows_at(results, "table1", "full", set()) or "*No runs yet.*\n"
    ),
    "report-supported": lambda results: report_claims(results, "supported"),
    "report-contradicted": lambda results: report_claims(results, "contradicted"),
    "report-open": lambda results: report_claims(results, "open"),
}


def refreshed(text: str, results: Results) -> str:
    """A page with its blocks as the records have them now."""

    def block(match: re.Match[str]) -> str:
        check_name("block", match[2], BLOCKS)
        return f"{match[1]}\n{BLOCKS[match[2]](results)}\n{match[4]}"

    return BLOCK.sub(block, text)


def refresh(pages: Sequence[Path], root: Path) -> list[Path]:
    """Write the blocks of some pages anew; those that changed."""
    results, changed = Results(root), []
    for page in pages:
        try:
            text = page.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DecaylabError(f"{page} cannot be read ({error}): give a Markdown file") from error
        if not BLOCK.search(text):
            raise DecaylabError(
                f"{page} has no block: put `<!-- results: NAME -->` and `<!-- end -->` where it"
                f" belongs, on lines of their own (names: {', '.join(BLOCKS)})"
            )
        new = refreshed(text, results)
        if new != text:
            replace_text(page, new)
            changed.append(page)
    return changed
