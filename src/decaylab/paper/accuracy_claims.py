"""Claims about test accuracy: E1-E4, E6, E9, E11 and E13, each from the runs of its artefact."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from decaylab.paper.evidence import Bench, Comparison, Evidence, Sample, named
from decaylab.paper.suite import Cell, search_command

KFAC, FIRST_ORDER = ("kfac-f", "kfac-g"), ("sgd", "adam")
Terms = list[tuple[float, Sample | None]]
CLOSED_BY_TRANSFER, CLOSED_BY_BOTH = 0.7, 0.85  # E6: "almost all", "all"
MATTERS = 1.0  # E4: points that "did not appear to matter" stays below


def e1(bench: Bench) -> Evidence:
    """Weight decay raises test accuracy in all pairs of Table 1."""
    evidence = Evidence(every=True)
    for key, pair in bench.groups("table1"):
        without, with_decay = bench.sample(pair[0]), bench.sample(pair[1])
        evidence.add(bench.difference(named(key), (1, with_decay), (-1, without)))
    evidence.notes += _papers_noise(bench)
    return _mean(evidence, "with decay against without")


def _papers_noise(bench: Bench) -> list[str]:
    """How many of the paper's own effects are within what one seed a cell tells apart."""
    within = total = 0
    for _, pair in bench.groups("table1"):
        samples = [bench.sample(cell) for cell in pair.values()]
        without, decayed = (cell.paper for cell in pair.values())
        if without is None or decayed is None or not all(samples):
            continue
        noise = [bench.pool(sample).deviation for sample in samples if sample is not None]
        within += abs(decayed - without) < 2 * math.hypot(*noise)
        total += 1
    if not total or bench.tier.on_digits:
        return []
    return [
        f"the paper's numbers are of one seed each: {within} of the {total} effects that were run"
        " here are within two standard errors of two such runs"
    ]


def e2(bench: Bench) -> Evidence:
    """Weight decay is at least as good as L2 where they differ (Fig. 1)."""
    evidence = Evidence()
    for key, schemes in bench.groups("fig1"):
        if key["optimizer"] != "sgd":
            decay, l2 = bench.sample(schemes["wd"]), bench.sample(schemes["l2"])
            evidence.add(bench.difference(named(key), (1, decay), (-1, l2)))
    return _mean(evidence, "weight decay against L2")


def e3(bench: Bench) -> Evidence:
    """Without BN, K-FAC gains most from decay: its smaller gain against the others' larger."""
    evidence = Evidence()
    for row, pairs in _rows(bench, evidence, batch_norm=False).items():
        size = {name: decayed.mean - without.mean for name, (without, decayed) in pairs.items()}
        low, high = min(KFAC, key=size.__getitem__), max(FIRST_ORDER, key=size.__getitem__)
        gains = ", ".join(f"{name} {100 * value:+.2f}" for name, value in size.items())
        evidence.add(
            bench.difference(
                f"{row}: {gains}; {low} over {high}",
                (1, pairs[low][1]),
                (-1, pairs[low][0]),
                (-1, pairs[high][1]),
                (1, pairs[high][0]),
            )
        )
    return _mean(evidence, "K-FAC's smaller gain against the larger of SGD and Adam")


def e4(bench: Bench) -> Evidence:
    """Under BN, SGD and Adam: which layers' decay brings the effect (Fig. 2). Two parts.

    The caption, "most of the generalization effect is due to applying it to layers with BN":
    wd-conv closes more than half of the gap between none and wd-all, wd-fc less than half. The
    text, "whether weight decay was applied to the top layer did not appear to matter": wd-fc
    differs from none, and wd-all from wd-conv, by less than a point.
    """
    evidence = Evidence(every=True)
    for key, schemes in bench.groups("fig2"):
        samples = {name: bench.sample(cell) for name, cell in schemes.items()}
        both, none = samples["wd-all"], samples["baseline"]
        gap = bench.difference("", (1, both), (-1, none))
        for scheme, sign in (("wd-conv", 1.0), ("wd-fc", -1.0)):
            half = ((-0.5 * sign, both), (-0.5 * sign, none))
            nearer = bench.difference("", (sign, samples[scheme]), *half, part=CAPTION)
            if gap is None or nearer is None:
                evidence.lack(CAPTION)
                continue
            share = _percent(_share(samples, scheme, gap))
            text = f"{named(key)}: gap {gap.value:+.2f}, closed by {scheme} {share}"
            evidence.add(_against_gap(gap, replace(nearer, text=text)))
        for scheme, other in (("wd-fc", "baseline"), ("wd-all", "wd-conv")):
            terms = (1.0, samples[scheme]), (-1.0, samples[other])
            text = f"{named(key)}: {scheme} over {other}"
            comparison = bench.difference(text, *terms, within=MATTERS)
            evidence.add(comparison and replace(comparison, part=TEXT), TEXT)
    return _mean(evidence)


CAPTION = "caption: most of the effect is of the layers with BN"
TEXT = f"text: the last layer does not matter (within {MATTERS:g} point)"


def e6(bench: Bench) -> Evidence:
    """Norm transfer closes almost all of the gap, with wd-fc all of it (Fig. 4)."""
    evidence = Evidence()
    for key, schemes in bench.groups("fig4"):
        samples = {name: bench.sample(cell) for name, cell in schemes.items()}
        gap = bench.difference("", (1, samples["wd"]), (-1, samples["none"]))
        rest = bench.difference("", (1, samples["wn-conv"]), (-1, samples["wd"]))
        both = bench.difference("", (1, samples["wd-fc+wn-conv"]), (-1, samples["wd"]))
        if gap is None or rest is None or both is None:
            evidence.lack()
            continue
        first, second = (_share(samples, name, gap) for name in ("wn-conv", "wd-fc+wn-conv"))
        almost = first >= CLOSED_BY_TRANSFER or rest.value >= 0
        closed = almost and (second >= CLOSED_BY_BOTH or both.value >= 0)
        text = f"{named(key)}: gap {gap.value:+.2f}, closed by wn-conv {_percent(first)}"
        text += f", by wd-fc+wn-conv {_percent(second)}"
        comparison = replace(
            rest, text=text, enough=gap.enough, runs=(*rest.runs, *both.runs), headline=first
        )
        if almost:
            comparison = replace(comparison, p=None, rule="for" if closed else "unclear")
        evidence.add(_against_gap(gap, replace(comparison, noise=None)))
    return evidence.summarised()


def e9(bench: Bench) -> Evidence:
    """K-FAC: wd-fc has the larger effect, wd-conv helps too, more for K-FAC-F (Fig. 6).

    Where the baseline has another learning rate than the runs with decay, the gain of wd-conv is
    taken over a baseline at theirs, too (`undecayed`).
    """
    evidence = Evidence()
    larger, helps = "wd-fc over wd-conv", "wd-conv over none"
    gains_more = "wd-conv's gain, F over G"
    gains: dict[object, dict[object, dict[str, Terms]]] = {}
    for key, schemes in bench.groups("fig6"):
        samples = {name: bench.sample(cell) for name, cell in schemes.items()}
        conv, fc, name = samples["wd-conv"], samples["wd-fc"], named(key)
        evidence.add(bench.difference(name, (1, fc), (-1, conv), part=larger), larger)
        baselines = {"": samples["baseline"]}
        if "undecayed" in schemes and schemes["undecayed"].runs != schemes["baseline"].runs:
            baselines[" at the same lr"] = samples["undecayed"]
        gain: dict[str, Terms] = {s: [(1.0, conv), (-1.0, base)] for s, base in baselines.items()}
        for same, terms in gain.items():
            evidence.add(bench.difference(name + same, *terms, part=helps), helps)
        gains.setdefault(key["network"], {})[key["optimizer"]] = gain
    for network, by_optimizer in gains.items():
        for same, terms in by_optimizer["kfac-f"].items():
            against_g = [*terms, *_times(-1, by_optimizer["kfac-g"][""])]
            more = bench.difference(f"{network}{same}", *against_g, part=gains_more)
            evidence.add(more, gains_more)
    return _mean(evidence)


def e11(bench: Bench) -> Evidence:
    """Large batches lose accuracy without decay; decay closes most of it (Table 3).

    The paper tunes learning rate and decay at each batch size: cells whose learning rate (and,
    with decay, weight decay) was not searched are not judged.
    """
    evidence = Evidence(every=True)
    unsearched: list[str] = []
    rows: dict[str, dict[tuple[object, object], Sample | None]] = {}
    for key, pair in bench.groups("table3"):
        samples = rows.setdefault(named(key, "dataset", "network", "optimizer"), {})
        for decay, cell in pair.items():
            published = bench.tier.on_digits or key["batch_size"] == 128
            tuned = published or _tuned(cell, bool(decay))
            samples[key["batch_size"], decay] = bench.sample(cell) if tuned else None
            unsearched += [] if tuned else [search_command(cell, bench.tier.name)]
    losses = {
        row: {d: [(1.0, samples.get((128, d))), (-1.0, samples.get((2000, d)))] for d in (0, 1)}
        for row, samples in rows.items()
    }
    if unsearched:
        evidence.notes.append(
            f"{len(dict.fromkeys(unsearched))} cells are not tuned as the paper's are (learning"
            f" rate, and decay where there is some): {unsearched[0]}"
        )
    return _most_closed(bench, evidence, "lost at batch 2000", losses)


def _tuned(cell: Cell, decayed: bool) -> bool:
    return {"lr", "weight_decay"} <= set(cell.searched) if decayed else "lr" in cell.searched


def e13(bench: Bench) -> Evidence:
    """Weight decay closes most of the gap between optimizers: their spread within a row."""
    evidence = Evidence(every=True)
    evidence.notes.append(
        "judged on the rows with BN: without it the paper's own numbers move apart, as E3 says"
    )
    spreads: dict[str, dict[int, Terms]] = {}
    for row, pairs in _rows(bench, evidence, batch_norm=True).items():
        for side in (0, 1):
            low, *_, high = sorted((p[side] for p in pairs.values()), key=lambda s: s.mean)
            spreads.setdefault(row, {})[side] = [(1.0, high), (-1.0, low)]
    return _most_closed(bench, evidence, "spread", spreads)


def _most_closed(
    bench: Bench, evidence: Evidence, what: str, rows: Mapping[str, Mapping[int, Terms]]
) -> Evidence:
    """Judge whether decay leaves less than half of what there is without it, all rows together.

    `rows` has what there is without decay (0) and with it (1). Their sum decides: it has to shrink
    beyond the noise, and by more than half; less than half, beyond the noise, contradicts. So does
    a row in which nothing was there, or it grew. Until all rows are there, each is shown by itself.
    """
    whole, left = Terms(), Terms()
    by_row, grown = list[Comparison](), list[Comparison]()
    for name, terms in rows.items():
        before, rest = bench.difference("", *terms[0]), bench.difference("", *terms[1])
        shrinks = bench.difference("", *terms[0], *_times(-1, terms[1]))
        if before is None or rest is None or shrinks is None:
            evidence.lack()
            continue
        text = f"{name} {what}: {before.value:.2f} without decay, {rest.value:.2f} with"
        evidence.notes.append(text)
        by_row.append(replace(shrinks, text=text))
        grown.append(replace(before, text=text, enough=shrinks.enough, needed=False))
        whole, left = whole + terms[0], left + terms[1]
    evidence.comparisons = [*by_row, *grown]
    if not whole:
        return evidence

    def total(*terms: tuple[float, Sample | None]) -> Comparison:
        comparison = bench.difference("", *terms)
        assert comparison is not None  # no sample is missing in these rows
        return comparison

    gap, rest = total(*whole), total(*left)
    shrinks, halved = (total(*_times(share, whole), *_times(-1, left)) for share in (1, 0.5))
    evidence.value = 1 - rest.value / gap.value if gap.value else float("nan")
    evidence.effect = (
        f"{what}, {'rows so far' if evidence.missing else 'all rows'} together: {gap.value:.2f}"
        f" points without decay, {rest.value:.2f} with it, {_percent(evidence.value)} closed"
    )
    if not evidence.missing:
        if halved.value > 0:
            halved = replace(halved, p=None, rule="for")
        rows_alone = [replace(row, needed=False) for row in by_row]
        evidence.comparisons = [*rows_alone, *grown, shrinks, _against_gap(gap, halved)]
    return evidence


def _times(factor: float, terms: Terms) -> Terms:
    return [(factor * weight, sample) for weight, sample in terms]


def _rows(
    bench: Bench, evidence: Evidence, *, batch_norm: bool
) -> dict[str, dict[str, tuple[Sample, Sample]]]:
    """Rows of Table 1: name -> optimizer -> (without, with decay).

    Those that lack a run count as missing in `evidence`.
    """
    rows: dict[str, dict[str, tuple[Sample, Sample] | None]] = {}
    for key, pair in bench.groups("table1"):
        if bool(key["batch_norm"]) == batch_norm:
            name = named(key, "dataset", "network", "batch_norm", "augment")
            rows.setdefault(name, {})[str(key["optimizer"])] = bench.pair(pair)
    whole = {}
    for name, row in rows.items():
        known = {optimizer: pair for optimizer, pair in row.items() if pair is not None}
        if len(known) == len(row):
            whole[name] = known
        else:
            evidence.lack()
    return whole


def _mean(evidence: Evidence, what: str = "") -> Evidence:
    """Fill in the mean over the comparisons, in points, and what was found, part by part."""
    comparisons = evidence.comparisons
    if comparisons:
        parts = evidence.by_part().items()
        first = next(iter(evidence.by_part().values()))
        evidence.value = statistics.fmean(c.value for c in first)
        evidence.effect = "; ".join(_told(part or what, members) for part, members in parts)
        against = evidence.against()
        evidence.notes += [f"against it: {c.text}" for c in against]
        if not against and len(comparisons) <= 4:
            evidence.notes += [c.text for c in comparisons]
    return evidence


def _told(what: str, comparisons: list[Comparison]) -> str:
    mean = statistics.fmean(c.value for c in comparisons)
    up = sum(c.value > 0 for c in comparisons)
    clear = sum(c.leaning() == "for" for c in comparisons)
    return (
        f"{what}: {mean:+.2f} points on average, positive in {up} of {len(comparisons)} comparisons"
        f" ({clear} beyond the noise)"
    )


def _against_gap(gap: Comparison, comparison: Comparison) -> Comparison:
    """A comparison of shares of a gap: unclear unless the gap itself is there."""
    enough, runs = gap.enough and comparison.enough, (*gap.runs, *comparison.runs)
    judged = replace(comparison, enough=enough, runs=runs)
    if gap.leaning() == "for":
        return judged
    return replace(judged, p=None, rule="unclear", noise=None)


def _share(samples: dict[object, Sample | None], scheme: str, gap: Comparison) -> float:
    """(accuracy of the scheme - baseline) / gap; nan if there is no gap."""
    base = samples["baseline"] if "baseline" in samples else samples["none"]
    sample = samples[scheme]
    if sample is None or base is None or gap.value == 0:
        return float("nan")
    return 100 * (sample.mean - base.mean) / gap.value


def _percent(share: float) -> str:
    return "nothing to close" if math.isnan(share) else f"{100 * share:z.0f} %"
