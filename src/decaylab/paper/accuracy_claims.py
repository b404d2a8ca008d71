"""Claims about test accuracy: E1-E4, E6, E9, E11 and E13, each from the runs of its artefact."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from decaylab.paper.evidence import Bench, Comparison, Evidence, Leaning, Noise, Sample, named

KFAC, FIRST_ORDER = ("kfac-f", "kfac-g"), ("sgd", "adam")
Terms = list[tuple[float, Sample | None]]
CLOSED_BY_TRANSFER, CLOSED_BY_BOTH = 0.7, 0.85  # E6: "almost all", "all"


def e1(bench: Bench) -> Evidence:
    """Weight decay raises test accuracy in all pairs of Table 1."""
    evidence = Evidence(every=True)
    for key, pair in bench.groups("table1"):
        without, with_decay = bench.sample(pair[0]), bench.sample(pair[1])
        evidence.add(bench.difference(named(key), (1, with_decay), (-1, without)))
    return _mean(evidence, "with decay against without")


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
        told = ", ".join(f"{name} {100 * value:+.2f}" for name, value in size.items())
        evidence.add(
            bench.difference(
                f"{row}: {told}; {low} over {high}",
                (1, pairs[low][1]),
                (-1, pairs[low][0]),
                (-1, pairs[high][1]),
                (1, pairs[high][0]),
            )
        )
    return _mean(evidence, "K-FAC's smaller gain against the larger of SGD and Adam")


def e4(bench: Bench) -> Evidence:
    """Under BN, SGD and Adam: wd-conv does what wd-all does, wd-fc what none does (Fig. 2).

    wd-conv closes more than half of the gap between none and wd-all, wd-fc less than half.
    """
    evidence = Evidence(every=True)
    for key, schemes in bench.groups("fig2"):
        found = {name: bench.sample(cell) for name, cell in schemes.items()}
        both, none = found["wd-all"], found["baseline"]
        gap = bench.difference("", (1, both), (-1, none))
        for scheme, sign, side in (("wd-conv", 1.0, "wd-all"), ("wd-fc", -1.0, "none")):
            half = ((-0.5 * sign, both), (-0.5 * sign, none))
            part = f"{scheme}, on {side}'s side of the middle"
            nearer = bench.difference("", (sign, found[scheme]), *half, part=part)
            if gap is None or nearer is None:
                evidence.missing += 1
                continue
            share = _percent(_share(found, scheme, gap))
            text = f"{named(key)}: gap {gap.value:+.2f}, closed by {scheme} {share}"
            evidence.add(_against_gap(gap, replace(nearer, text=text)))
    return _mean(evidence)


def e6(bench: Bench) -> Evidence:
    """Norm transfer closes almost all of the gap, with wd-fc all of it (Fig. 4)."""
    evidence = Evidence()
    for key, schemes in bench.groups("fig4"):
        found = {name: bench.sample(cell) for name, cell in schemes.items()}
        gap = bench.difference("", (1, found["wd"]), (-1, found["none"]))
        rest = bench.difference("", (1, found["wn-conv"]), (-1, found["wd"]))
        both = bench.difference("", (1, found["wd-fc+wn-conv"]), (-1, found["wd"]))
        if gap is None or rest is None or both is None:
            evidence.missing += 1
            continue
        first, second = (_share(found, name, gap) for name in ("wn-conv", "wd-fc+wn-conv"))
        closed = (first >= CLOSED_BY_TRANSFER or rest.value >= 0) and (
            second >= CLOSED_BY_BOTH or both.value >= 0
        )
        text = f"{named(key)}: gap {gap.value:+.2f}, closed by wn-conv {_percent(first)}"
        text += f", by wd-fc+wn-conv {_percent(second)}"
        leaning: Leaning = (
            "for" if closed else "against" if rest.leaning == "against" else "unclear"
        )
        runs = (*rest.runs, *both.runs)
        comparison = Comparison(text, leaning, gap.enough, runs, first, spread=rest.spread)
        evidence.add(_against_gap(gap, comparison))
    return evidence.told()


def e9(bench: Bench) -> Evidence:
    """K-FAC: wd-fc has the larger effect, wd-conv helps too, more for K-FAC-F (Fig. 6)."""
    evidence = Evidence()
    gains: dict[object, dict[object, tuple[Sample | None, Sample | None]]] = {}
    for key, schemes in bench.groups("fig6"):
        found = {name: bench.sample(cell) for name, cell in schemes.items()}
        base, conv, fc = found["baseline"], found["wd-conv"], found["wd-fc"]
        name = named(key)
        evidence.add(bench.difference(name, (1, fc), (-1, conv), part="wd-fc over wd-conv"))
        evidence.add(bench.difference(name, (1, conv), (-1, base), part="wd-conv over none"))
        gains.setdefault(key["network"], {})[key["optimizer"]] = (conv, base)
    for network, by_optimizer in gains.items():
        (conv_f, base_f), (conv_g, base_g) = by_optimizer["kfac-f"], by_optimizer["kfac-g"]
        terms = ((1.0, conv_f), (-1.0, base_f), (-1.0, conv_g), (1.0, base_g))
        evidence.add(bench.difference(str(network), *terms, part="wd-conv's gain, F over G"))
    return _mean(evidence)


def e11(bench: Bench) -> Evidence:
    """Large batches lose accuracy without decay; decay closes most of it (Table 3)."""
    losses: dict[str, dict[object, Terms]] = {}
    for key, batches in _by_batch(bench).items():
        small, large = batches.get(128, {}), batches.get(2000, {})
        losses[key] = {d: [(1.0, small.get(d)), (-1.0, large.get(d))] for d in (0, 1)}
    return _most_closed(bench, Evidence(every=True), "lost at batch 2000", losses)


def e13(bench: Bench) -> Evidence:
    """Weight decay closes most of the gap between optimizers: their spread within a row."""
    evidence = Evidence(every=True)
    evidence.notes.append(
        "judged on the rows with BN: without it the paper's own numbers move apart, as E3 says"
    )
    spreads: dict[str, dict[object, Terms]] = {}
    for row, pairs in _rows(bench, evidence, batch_norm=True).items():
        for side in (0, 1):
            ordered = sorted((pair[side] for pair in pairs.values()), key=lambda one: one.mean)
            spreads.setdefault(row, {})[side] = [(1.0, ordered[-1]), (-1.0, ordered[0])]
    return _most_closed(bench, evidence, "spread", spreads)


def _by_batch(bench: Bench) -> dict[str, dict[object, dict[object, Sample | None]]]:
    """Table 3: row -> batch size -> decay -> accuracy."""
    rows: dict[str, dict[object, dict[object, Sample | None]]] = {}
    for key, pair in bench.groups("table3"):
        row = named(key, "dataset", "network", "optimizer")
        found = {decay: bench.sample(cell) for decay, cell in pair.items()}
        rows.setdefault(row, {})[key["batch_size"]] = found
    return rows


def _most_closed(
    bench: Bench, evidence: Evidence, what: str, rows: Mapping[str, Mapping[object, Terms]]
) -> Evidence:
    """Judge whether decay leaves less than half of what there is without it, all rows together.

    `rows` has what there is without decay (0) and with it (1). Their sum decides, which has to
    shrink beyond the noise and by more than half, and rows in which nothing was there, or it grew.
    Until all rows are there, each is shown by itself.
    """
    whole, left = Terms(), Terms()
    for name, terms in rows.items():
        there, rest = bench.difference("", *terms[0]), bench.difference("", *terms[1])
        shrinks = bench.difference("", *terms[0], *_times(-1, terms[1]))
        if there is None or rest is None or shrinks is None:
            evidence.missing += 1
            continue
        text = f"{name} {what}: {there.value:.2f} without decay, {rest.value:.2f} with"
        evidence.notes.append(text)
        evidence.add(replace(shrinks, text=text))
        if there.leaning == "against":
            evidence.add(replace(there, enough=shrinks.enough, text=text))
        whole, left = whole + terms[0], left + terms[1]
    if not whole:
        return evidence
    gap, rest = bench.difference("", *whole), bench.difference("", *left)
    shrinks, halved = (
        bench.difference("", *_times(share, whole), *_times(-1, left)) for share in (1, 0.5)
    )
    assert shrinks is not None
    assert gap is not None
    assert rest is not None
    assert halved is not None
    evidence.value = 1 - rest.value / gap.value if gap.value else float("nan")
    evidence.effect = (
        f"{what}, {'rows so far' if evidence.missing else 'all rows'} together: {gap.value:.2f}"
        f" points without decay, {rest.value:.2f} with it, {_percent(evidence.value)} closed"
    )
    if not evidence.missing:
        against = [row for row in evidence.comparisons if row.leaning == "against"]
        evidence.comparisons = [*against, shrinks, _against_gap(gap, halved)]
    return evidence


def _times(factor: float, terms: Terms) -> Terms:
    return [(factor * of_one, sample) for of_one, sample in terms]


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
            evidence.missing += 1
    return whole


def _mean(evidence: Evidence, what: str = "") -> Evidence:
    """Fill in the mean over the comparisons, in points, and what was found, part by part."""
    found = evidence.comparisons
    if found:
        evidence.value = statistics.fmean(c.value for c in found)
        parts = evidence.parts().items()
        evidence.effect = "; ".join(_told(part or what, of_part) for part, of_part in parts)
        against = [c.text for c in found if c.leaning == "against"]
        evidence.notes += [f"against it: {text}" for text in against]
        if not against and len(found) <= 4:
            evidence.notes += [c.text for c in found]
    return evidence


def _told(what: str, found: list[Comparison]) -> str:
    mean = statistics.fmean(c.value for c in found)
    up, clear = sum(c.value > 0 for c in found), sum(c.leaning == "for" for c in found)
    return (
        f"{what}: {mean:+.2f} points on average, positive in {up} of {len(found)} comparisons"
        f" ({clear} beyond the noise)"
    )


def _against_gap(gap: Comparison, comparison: Comparison) -> Comparison:
    """A comparison of shares of a gap: unclear unless the gap itself is there."""
    enough, runs = gap.enough and comparison.enough, (*gap.runs, *comparison.runs)
    kept = replace(comparison, enough=enough, runs=runs)
    return kept if gap.leaning == "for" else replace(kept, leaning="unclear", noise=Noise())


def _share(found: dict[object, Sample | None], scheme: str, gap: Comparison) -> float:
    """(accuracy of the scheme - baseline) / gap; nan where there is no gap."""
    base = found["baseline"] if "baseline" in found else found["none"]
    sample = found[scheme]
    if sample is None or base is None or gap.value == 0:
        return float("nan")
    return 100 * (sample.mean - base.mean) / gap.value


def _percent(share: float) -> str:
    return "nothing to close" if math.isnan(share) else f"{100 * share:.0f} %"
