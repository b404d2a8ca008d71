import math
from dataclasses import replace

import pytest

from decaylab.paper import Readings, cells
from decaylab.paper.claims import CLAIMS, judge
from decaylab.paper.evidence import Comparison, Evidence, Noise
from decaylab.paper.mechanism_claims import _ranks
from decaylab.records import Manifest, Row, RunStore

TRAINED = {"train/accuracy": 1.0, "train/loss": 1e-3, "test/loss": 0.5}


class Records:
    """Finished runs written by hand, so that a test knows every number in them."""

    def __init__(self, root, tier="full"):
        self.store, self.tier, self.searched = RunStore(root), tier, root / "searched"

    def write(self, spec, finals, curves=None, exposure=5.0, status="finished", **manifest):
        spec = spec.resolved()
        every = spec.lr_drop_every if spec.decay != "none" else 0
        rows = [Row(spec.epochs, spec.epochs, 1.0, name, v) for name, v in finals.items()]
        rows += [Row(e, e, 1.0, "exposure/stage", exposure) for e in (1, every) if every]
        for name, curve in (curves or {}).items():
            rows += [Row(epoch, epoch, 1.0, name, value) for epoch, value in enumerate(curve)]
        with self.store.folder(spec.id).writing(spec.to_toml()) as folder:
            folder.rows_writer.append(rows)
            made = Manifest(spec.id, status, "0", None, "2", "cpu", spec.seed, self.tier, 0.0, 0.0)
            folder.write_manifest(replace(made, **manifest))

    def fill(self, artefact, values, seeds=1, **rest):
        """`values(cell, seed)` gives the finals of each run; None leaves it out."""
        written = set()
        for cell in cells(artefact, self.tier, seeds):
            for spec in cell.runs:
                finals = values(cell, spec.seed)
                if finals is not None and spec.id not in written:
                    written.add(spec.id)
                    self.write(spec, finals, **rest)

    def claims(self):
        found = judge(Readings(self.store), self.tier, seeds=3, searched_folder=self.searched)
        return {claim.id: claim for claim in found}


def papers(cell, seed=0, metric="test/accuracy"):
    scale = 0.01 if metric == "test/accuracy" else 1.0
    return {**TRAINED, metric: scale * cell.paper}


def test_nothing_is_supported_without_runs(tmp_path):
    for tier in ("smoke", "quick", "short", "full"):
        found = judge(Readings(RunStore(tmp_path)), tier)
        assert [claim.id for claim in found] == [f"E{n}" for n in range(1, 16)]
        assert {claim.verdict for claim in found} == {"not enough runs"}
        assert {(claim.n, claim.value, claim.effect) for claim in found} == {(0, None, "")}
        assert len(CLAIMS) == 15


def test_the_papers_own_numbers_support_its_claims(tmp_path):
    records = Records(tmp_path)
    records.fill("table1", papers)
    claims = records.claims()
    for name in ("E1", "E3", "E13", "E14"):
        assert claims[name].verdict == "supported", claims[name]
    assert claims["E1"].n == 64
    # the mean of the paper's 32 differences, by hand from its table
    gains = {}
    for cell in cells("table1", "full"):
        row = tuple(cell.key.values())[:-1]
        gains[row] = gains.get(row, 0.0) + (1 if cell.key["weight_decay"] else -1) * cell.paper
    assert claims["E1"].value == pytest.approx(sum(gains.values()) / 32)
    assert claims["E1"].spread is None
    assert "one seed" in claims["E1"].notes
    assert claims["E2"].verdict == claims["E8"].verdict == "not enough runs"


def test_tables_2_and_3_support_e8_and_e11(tmp_path):
    records = Records(tmp_path)
    records.fill("table2", lambda cell, seed: papers(cell, metric="jacobian_norm"))
    records.fill("table3", papers)
    claims = records.claims()
    assert claims["E8"].verdict == "supported"
    assert claims["E8"].value == pytest.approx((498 / 51.44 + 2115 / 64.16) / 2)
    assert claims["E11"].verdict == "supported", claims["E11"]
    assert claims["E15"].verdict == "not enough runs"  # a loss of 1e-3 is neither zero nor not


@pytest.mark.parametrize(
    ("left", "verdict"), [(0.2, "supported"), (0.52, "not enough runs"), (0.9, "contradicted")]
)
def test_most_of_a_loss_is_more_than_half_of_it(tmp_path, left, verdict):
    """E11: without decay five points are lost at batch 2000, with it a part `left` of them."""
    records = Records(tmp_path)

    def accuracy(cell, seed):
        lost = 0.05 * (cell.key["batch_size"] == 2000)
        return {"test/accuracy": 0.93 - lost * (left if cell.key["weight_decay"] else 1)}

    records.fill("table3", accuracy)
    claim = records.claims()["E11"]
    assert claim.verdict == verdict, claim
    assert claim.value == pytest.approx(1 - left)
    assert f"{100 * (1 - left):.0f} % closed" in claim.effect


def test_a_gain_at_large_batches_is_no_loss(tmp_path):
    records = Records(tmp_path)
    grows = lambda cell, seed: {"test/accuracy": 0.9 + cell.key["batch_size"] * 2e-5}  # noqa: E731
    records.fill("table3", grows)
    assert records.claims()["E11"].verdict == "contradicted"


@pytest.mark.parametrize(
    ("left", "verdict"), [(0.1, "supported"), (0.52, "not enough runs"), (0.9, "contradicted")]
)
def test_most_of_a_spread_is_more_than_half_of_it(tmp_path, left, verdict):
    """E13: SGD is six points below the others without decay, a part `left` of that with it."""
    records = Records(tmp_path)

    def accuracy(cell, seed):
        below = 0.06 * (cell.key["optimizer"] == "sgd")
        return TRAINED | {"test/accuracy": 0.93 - below * (left if cell.key["weight_decay"] else 1)}

    records.fill("table1", accuracy)
    claim = records.claims()["E13"]
    assert claim.verdict == verdict, claim
    assert claim.value == pytest.approx(1 - left)


def test_a_missing_run_is_enough_to_withhold_support(tmp_path):
    records = Records(tmp_path)
    last = cells("table1", "full")[-1]
    records.fill("table1", lambda cell, seed: None if cell == last else papers(cell))
    assert records.claims()["E1"].verdict == "not enough runs"
    assert "1 of 32 comparisons lack runs" in records.claims()["E1"].notes
    row_by_row = records.claims()["E13"]
    assert row_by_row.verdict == "not enough runs"
    assert row_by_row.notes[0] == "1 of 6 comparisons lack runs"
    assert "rows so far together" in row_by_row.effect
    (spec,) = last.runs
    records.write(spec, papers(last), status="interrupted")
    assert records.claims()["E1"].verdict == "not enough runs"


def test_one_pair_clearly_the_other_way_contradicts_and_a_slight_one_asks_for_seeds(tmp_path):
    def turned(by):
        def values(cell, seed):
            odd = cell.key["optimizer"] == "adam" and cell.key["network"] == "vgg16"
            odd = odd and not cell.key["batch_norm"] and cell.key["weight_decay"]
            return papers(cell) | ({"test/accuracy": 0.8316 - by} if odd else {})

        return values

    for by, verdict in ((0.002, "not enough runs"), (0.05, "contradicted")):
        records = Records(tmp_path / str(by))
        records.fill("table1", turned(by))
        claim = records.claims()["E1"]
        assert claim.verdict == verdict
        said = "against it: cifar10 vgg16 adam" if by > 0.01 else "1 of 32 differences are negative"
        assert any(said in note for note in claim.notes)


def test_a_short_schedule_without_exposure_tells_nothing(tmp_path):
    records = Records(tmp_path / "weak", "short")
    records.fill("table1", papers, exposure=0.4)
    assert records.claims()["E1"].verdict == "not enough schedule"
    records = Records(tmp_path / "against", "short")
    falling = lambda cell, seed: {**TRAINED, "test/accuracy": 0.9 - 0.1 * cell.key["weight_decay"]}  # noqa: E731
    records.fill("table1", falling, exposure=0.4)
    assert records.claims()["E1"].verdict == "not enough schedule"
    records = Records(tmp_path / "enough", "short")
    records.fill("table1", papers, exposure=1.5)
    claim = records.claims()["E1"]
    assert claim.verdict == "supported"
    assert "at one fifth of the paper's schedule" in claim.notes
    records = Records(tmp_path / "full", "full")
    records.fill("table1", papers, exposure=0.4)
    assert records.claims()["E1"].verdict == "supported"  # the paper's own schedule


def test_with_three_seeds_the_noise_is_theirs(tmp_path):
    wobble = (-0.004, 0.0, 0.004)

    def values(cell, seed):
        gain = 0.003 if cell.key["weight_decay"] else 0.0
        shift = wobble[seed] if cell.key["weight_decay"] else -wobble[seed]
        return {**TRAINED, "test/accuracy": 0.9 + gain + shift}

    records = Records(tmp_path)
    records.fill("table1", values, seeds=3)
    claim = records.claims()["E1"]
    assert claim.n == 192
    assert claim.value == pytest.approx(0.3)
    assert claim.spread == pytest.approx(0.8)  # points: the difference moves by 2 * 0.4
    assert claim.verdict == "supported"  # 0.3 with an error of 0.8 / sqrt(3) / sqrt(32)


@pytest.mark.parametrize(("seeds", "reach"), [(3, 4.527), (5, 2.869), (30, 2.089)])
def test_few_seeds_must_be_further_from_zero(seeds, reach):
    """Two standard errors where they are known; Student's t at the same certainty, by tables."""
    noise = Noise(0.5, seeds - 1)
    assert noise.reach == pytest.approx(0.5 * reach, rel=1e-3)
    assert noise.leaning(0.49 * reach) == "unclear"
    assert (noise.leaning(0.51 * reach), noise.leaning(-0.51 * reach)) == ("for", "against")
    assert Noise(0.5).reach == 1.0


def test_the_noise_of_a_mean_has_the_degrees_of_its_parts():
    mean = Noise.of_mean([Noise(0.6, 2), Noise(0.6, 2), Noise(0.6, 2), Noise(0.6, 2)])
    assert (mean.error, mean.degrees) == (pytest.approx(0.3), pytest.approx(8))
    assert Noise.of_mean([Noise(0.6), Noise(0.8)]) == Noise(pytest.approx(0.5))
    assert Noise.of_mean([Noise(), Noise(0.8, 2)]).reach == math.inf


def test_what_is_within_the_noise_asks_for_more_seeds(tmp_path):
    records = Records(tmp_path)
    records.fill("table1", lambda cell, seed: {**TRAINED, "test/accuracy": 0.9})
    claim = records.claims()["E1"]
    assert claim.verdict == "not enough runs"
    assert any("more seeds" in note for note in claim.notes)


def test_asking_for_the_verdict_changes_nothing():
    open_still = Comparison("by", "unclear", True, (), value=-0.1, noise=Noise(1.0))
    evidence = Evidence([open_still])
    assert [evidence.verdict(), evidence.verdict()] == ["not enough runs"] * 2
    assert evidence == Evidence([open_still])
    assert evidence.doubt.startswith("1 of 1 differences are negative, within the noise")
    assert not Evidence([open_still], missing=1).doubt


@pytest.mark.parametrize(
    ("transferred", "both", "verdict"),
    [(0.76, 0.77, "supported"), (0.71, 0.73, "contradicted"), (0.745, 0.77, "not enough runs")],
)
def test_the_share_of_the_gap_that_norm_transfer_closes(tmp_path, transferred, both, verdict):
    found = {"none": 0.70, "wd": 0.77, "wn-conv": transferred, "wd-fc+wn-conv": both}
    records = Records(tmp_path)
    if verdict == "not enough runs":
        found["wd"], found["none"] = 0.77, 0.77 - 0.001  # there is no gap to speak of
        found["wn-conv"] = 0.7692
    records.fill("fig4", lambda cell, seed: {"test/accuracy": found[cell.key["scheme"]]})
    assert records.claims()["E6"].verdict == verdict


def test_effective_lr_falls_without_decay_and_stays_with_it(tmp_path):
    for flat, verdict in ((1.0, "supported"), (0.02, "contradicted")):
        records = Records(tmp_path / str(flat))
        for cell in cells("fig3", "full"):
            (spec,) = cell.runs
            end = flat if cell.key["weight_decay"] else 0.1
            curve = [1.0 + (end - 1.0) * epoch / 60 for epoch in range(61)]
            records.write(spec, {}, {"effective_lr/stem.0": [*curve, 1e-9]})  # then lr drops
        claim = records.claims()["E5"]
        assert claim.verdict == verdict
    falls, turned = (1 - 0.9 / 60) / 0.1, (1 - 0.98 / 60) / 0.02  # from epoch 1 to 60
    assert claim.value == pytest.approx(falls / turned)


def test_traces_of_fisher_and_gauss_newton(tmp_path):
    for fall, verdict in ((1e4, "supported"), (1.5, "contradicted")):
        records = Records(tmp_path / str(fall))
        curves = {"fisher_trace_normalised/stem.0": [50.0, 1.0, 1 / fall],
                  "gn_trace_normalised/stem.0": [50.0, 1.0, 2.0]}  # fmt: skip
        records.fill("fig7", lambda cell, seed: TRAINED, curves=curves)
        claim = records.claims()["E10"]
        assert claim.verdict == verdict
        assert claim.value == pytest.approx(fall)


def test_traces_of_a_short_schedule_that_did_not_fit_the_data_are_not_judged(tmp_path):
    for accuracy, verdict in ((0.98, "not enough schedule"), (0.995, "contradicted")):
        records = Records(tmp_path / str(accuracy), tier="short")
        curves = {"fisher_trace_normalised/stem.0": [50.0, 1.0, 1 / 1.5],
                  "gn_trace_normalised/stem.0": [50.0, 1.0, 2.0]}  # fmt: skip
        given = {"train/accuracy": accuracy}
        records.fill("fig7", lambda cell, seed, given=given: given, curves=curves)
        assert records.claims()["E10"].verdict == verdict


def test_correlation_over_nets_that_were_trained_to_the_end(tmp_path):
    for sign, verdict in ((1, "supported"), (-1, "contradicted")):
        records, number = Records(tmp_path / str(sign)), iter(range(100))

        def values(cell, seed, sign=sign, number=number):
            size = next(number) % 24
            trained = 0.5 if size == 5 else 1.0  # one net of each set is left out
            return {"kfac_gn_norm": math.exp(size), "jacobian_norm": 100.0 + sign * size,
                    "train/accuracy": trained, "train/loss": 0.0,
                    "test/loss": 1.0 + sign * 0.01 * size}  # fmt: skip

        records.fill("fig5", values)
        claim = records.claims()["E7"]
        assert claim.verdict == verdict
        assert claim.value == pytest.approx(sign)
        assert "mnist: 1 below 99.9% left out" in claim.notes


SEARCHED_LR = """
[cell]
dataset = "cifar10"
network = "{network}"
batch_norm = 1
augment = 0
optimizer = "kfac-g"
batch_size = 640
constant_lr = 1
scheme = "none"
[winner]
lr = 0.03
[search]
tier = "full"
"""


@pytest.mark.parametrize(
    ("epochs", "searched", "verdict"),
    [(8, False, "supported"), (30, True, "contradicted"), (30, False, "not enough runs")],
)
def test_convergence_in_epochs_and_in_time(tmp_path, epochs, searched, verdict):
    folder = tmp_path / "searched"
    folder.mkdir()
    for network in ("vgg16", "resnet32") if searched else ():
        (folder / f"{network}.toml").write_text(SEARCHED_LR.format(network=network))
    records = Records(tmp_path)
    for cell in cells("fig9", "full", searched_folder=folder):
        (spec,) = cell.runs
        kfac = cell.key["optimizer"] == "kfac-g"
        assert not (kfac and searched) or spec.lr == 0.03
        reached = epochs if kfac else 50
        losses = [1e-5 if epoch >= reached else 1.0 for epoch in range(60)]
        seconds = [float(epoch) for epoch in range(60)]
        records.write(spec, {}, {"train/running_loss": losses, "train/seconds": seconds})
    claim = records.claims()["E12"]
    assert claim.verdict == verdict
    assert claim.said == verdict
    asks = "decaylab search dataset=cifar10 network=vgg16" in " ".join(claim.notes)
    assert asks == (verdict == "not enough runs") == ("neither published nor" in claim.effect)


def test_times_of_runs_that_shared_a_device_or_had_others_are_not_compared(tmp_path):
    for shared in ({"at_once": 4}, {"device": "another"}, {"compiled": True}):
        records = Records(tmp_path / "".join(shared))
        curves = {"train/running_loss": [1.0, 1e-5], "train/seconds": [0.0, 1.0]}
        for cell in cells("fig9", "full"):
            (spec,) = cell.runs
            records.write(spec, {}, curves, **shared if spec.optimizer == "sgd" else {})
        claim = records.claims()["E12"]
        assert claim.verdict == "not enough runs"
        assert "without --at-once and --compiled" in claim.notes[-2]


def test_nets_that_do_not_fit_contradict_e14_only_at_the_full_schedule(tmp_path):
    for tier, verdict in (("full", "contradicted"), ("short", "not enough schedule")):
        records = Records(tmp_path / tier, tier)
        short = lambda cell, seed: papers(cell) | {"train/accuracy": 0.97}  # noqa: E731
        records.fill("table1", short)
        claim = records.claims()["E14"]
        assert claim.verdict == verdict
        assert "and 56 more" in claim.notes  # of 64, eight are named


def test_scopes_of_first_and_second_order(tmp_path):
    first = {"baseline": 0.68, "wd-conv": 0.73, "wd-fc": 0.683, "wd-all": 0.735}
    second = {"baseline": 0.68, "wd-conv": 0.70, "wd-fc": 0.72, "wd-all": 0.735}
    records = Records(tmp_path)
    records.fill("fig2", lambda cell, seed: {"test/accuracy": first[cell.key["scheme"]]})

    def of_kfac(cell, seed):
        more = 0.015 * (cell.key["scheme"] in ("wd-conv", "wd-fc"))
        fisher = cell.key["optimizer"] == "kfac-f"
        return {"test/accuracy": second[cell.key["scheme"]] + more * fisher}

    records.fill("fig6", of_kfac)
    claims = records.claims()
    assert claims["E4"].verdict == "supported"
    assert claims["E9"].verdict == "supported"
    other = Records(tmp_path / "other")
    turned = first | {"wd-conv": 0.683, "wd-fc": 0.73}
    other.fill("fig2", lambda cell, seed: {"test/accuracy": turned[cell.key["scheme"]]})
    assert other.claims()["E4"].verdict == "contradicted"


def test_each_part_of_e4_needs_support_of_its_own(tmp_path):
    """Decaying the convolutions does all; the last layer does a hair less than half of it."""
    found = {"baseline": 0.65, "wd-conv": 0.73, "wd-fc": 0.6899, "wd-all": 0.73}
    records = Records(tmp_path)
    records.fill("fig2", lambda cell, seed: {"test/accuracy": found[cell.key["scheme"]]})
    claim = records.claims()["E4"]
    assert claim.verdict == "not enough runs"
    assert "wd-conv, on wd-all's side of the middle: +4.00 points on average" in claim.effect
    assert "wd-fc, on none's side of the middle: +0.01 points on average" in claim.effect


def test_each_part_of_e9_needs_support_of_its_own(tmp_path):
    """Decaying the convolutions helps far beyond the noise; the last layer does no more."""
    found = {"baseline": 0.65, "wd-conv": 0.70, "wd-fc": 0.7001, "wd-all": 0.73}
    records = Records(tmp_path)

    def accuracy(cell, seed):
        fisher = 0.03 * (cell.key["optimizer"] == "kfac-f" and cell.key["scheme"] != "baseline")
        return {"test/accuracy": found[cell.key["scheme"]] + fisher}

    records.fill("fig6", accuracy)
    claim = records.claims()["E9"]
    assert claim.verdict == "not enough runs"
    assert "wd-fc over wd-conv: +0.01 points on average, positive in 4 of 4" in claim.effect
    assert "wd-conv over none: +6.50 points on average" in claim.effect
    assert "wd-conv's gain, F over G: +3.00 points on average" in claim.effect


@pytest.mark.parametrize(("scheme", "accuracy"), [("wd-conv", 0.69), ("wd-fc", 0.73)])
def test_a_scope_on_the_wrong_side_of_the_middle_contradicts_e4(tmp_path, scheme, accuracy):
    """wd-conv that closes a sixth of the gap does not do what wd-all does, though wd-fc less."""
    found = {"baseline": 0.68, "wd-conv": 0.735, "wd-fc": 0.68, "wd-all": 0.74, scheme: accuracy}
    records = Records(tmp_path)
    records.fill("fig2", lambda cell, seed: {"test/accuracy": found[cell.key["scheme"]]})
    claim = records.claims()["E4"]
    assert claim.verdict == "contradicted", claim
    share = 100 * (accuracy - 0.68) / 0.06
    assert any(f"closed by {scheme} {share:.0f} %" in note for note in claim.notes)


def test_l2_against_weight_decay_needs_the_searched_runs(tmp_path):
    better = {"none": 0.95, "l2": 0.955, "wd": 0.975}
    records = Records(tmp_path, "quick")
    records.fill("fig1", lambda cell, seed: {"test/accuracy": better[cell.key["scheme"]]})
    claim = records.claims()["E2"]
    assert claim.verdict == "supported", claim
    assert "on digits with small stand-in nets, not on the paper's data" in claim.notes
    (nets,) = [
        note for note in claim.notes if note.startswith("names are the paper's, the nets are ")
    ]
    assert "mlp 256x256x256x256 for vgg16" in nets
    assert "resnet20 for resnet32" in nets
    assert claim.data == "digits"


def test_large_batches_without_decay_keep_a_training_loss(tmp_path):
    for loss, verdict in ((0.2, "supported"), (1e-5, "contradicted")):
        records = Records(tmp_path / str(loss))
        records.fill("table3", lambda cell, seed, loss=loss: papers(cell) | {"train/loss": loss})
        assert records.claims()["E15"].verdict == verdict


def test_a_folder_of_another_spec_is_left_out_and_named(tmp_path):
    records = Records(tmp_path)
    (spec,) = cells("table1", "full")[0].runs
    records.write(spec, {"test/accuracy": 0.9})
    path = tmp_path / spec.id / "spec.toml"
    path.write_text(replace(spec.resolved(), lr=0.5).to_toml())
    readings = Readings(records.store)
    assert readings.of(spec) is None
    assert "lr is 0.5 there" in readings.left_out[0]


def test_ranks_share_ties():
    assert _ranks([2.0, 9.0, 2.0, 4.0]) == [1.5, 4.0, 1.5, 3.0]
