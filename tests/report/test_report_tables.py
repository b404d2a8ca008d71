import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ttest_ind

from decaylab.report.tables import (
    Entry,
    OverSeeds,
    Pair,
    Table,
    agreement,
    legend,
    pairs,
    to_csv,
    to_grid,
)


def entry(paper, *ours, decayed=False, comparable=True, key=("vgg16", "sgd")):
    return Entry(key, decayed, paper, OverSeeds(tuple(ours)), "full", comparable)


def table(*entries, effect="difference"):
    return Table(("network", "optimizer", "weight_decay"), entries, effect)


@pytest.mark.parametrize(
    ("ours", "effect", "tone"),
    [
        (90.5, "difference", "good"),
        (91.4, "difference", "near"),
        (88.0, "difference", "bad"),
        (130.0, "ratio", "good"),
        (60.0, "ratio", "good"),
        (50.0, "ratio", "near"),
        (20.0, "ratio", "bad"),
        (400.0, "ratio", "bad"),
    ],
)
def test_colour_by_agreement(ours, effect, tone):
    assert agreement(entry(90.0, ours), effect) == tone


def test_what_is_not_comparable_has_no_colour_of_agreement():
    assert agreement(entry(90.0, 90.0, comparable=False), "difference") == "plain"
    assert agreement(entry(90.0), "difference") == ""
    assert agreement(entry(None, 90.0), "difference") == ""


def test_one_seed_is_called_one_seed_everywhere():
    grid = to_grid(table(entry(90.0, 91.0), entry(92.0, 93.0, 94.0, decayed=True)))
    (row,) = [[cell.text for cell in row] for row in grid.rows]
    assert row[:2] == ["VGG16", "SGD"]
    assert row[2:5] == ["90.00", "91.00", "+1.00"]
    assert row[5:8] == ["92.00", "93.50 ± 0.71", "+1.50"]
    assert row[8:] == ["+2.00", "+2.50", "1 and 2"]


def test_a_table_that_is_not_the_papers_has_our_numbers_alone():
    grid = to_grid(table(entry(None, 91.0), entry(None, 93.0, decayed=True)))
    names = [cell.text for cell in grid.header]
    assert names == ["network", "optimizer", "no decay", "decay", "effect of decay", "seeds"]
    assert [[cell.text for cell in row] for row in grid.rows] == [
        ["VGG16", "SGD", "91.00", "93.00", "+2.00", "one seed"]
    ]


def test_the_effect_is_judged_from_two_seeds_on():
    def tone(without, with_decay):
        sides = (entry(90.0, *without), entry(92.0, *with_decay, decayed=True))
        return Pair(("vgg16", "sgd"), sides).tone()

    assert tone([90.0], [93.0]) == "plain"
    assert tone([90.0, 90.1], [93.0, 93.1]) == "good"
    assert tone([93.0, 93.1], [90.0, 90.1]) == "bad"
    assert tone([90.0, 92.0], [90.5, 92.5]) == "near"
    assert tone([], [93.0, 93.1]) == ""


def test_the_interval_is_welchs():
    """By scipy's own t test; of logarithms for ratios."""
    without, with_decay = (88.4, 88.1, 88.9), (88.7, 89.0, 88.2, 89.3)
    pair = Pair(("vgg16",), (entry(88.45, *without), entry(88.72, *with_decay, decayed=True)))
    test = ttest_ind(with_decay, without, equal_var=False).confidence_interval(0.95)
    assert pair.interval("difference") == pytest.approx((test.low, test.high), rel=1e-9)
    assert pair.words("difference") == f"+0.33 ({test.low:+.2f} to {test.high:+.2f})"
    assert pair.tone() == "near"
    test = ttest_ind(np.log(with_decay), np.log(without), equal_var=False).confidence_interval(0.95)
    ends = (math.exp(test.low), math.exp(test.high))
    assert pair.interval("ratio") == pytest.approx(ends, rel=1e-9)


def test_an_interval_needs_two_seeds_a_side_and_is_a_point_without_spread():
    assert Pair((), (entry(90.0, 90.0), entry(92.0, 93.0, 94.0))).interval("difference") is None
    assert Pair((), (entry(90.0, 90.0, 91.0), None)).interval("difference") is None
    same = Pair((), (entry(90.0, 90.0, 90.0), entry(92.0, 93.0, 93.0)))
    assert same.interval("difference") == (3.0, 3.0)
    assert Pair((), (entry(9.0, 0.0, 1.0), entry(9.0, 1.0, 2.0))).interval("ratio") is None


def test_a_cell_without_its_partner_stays():
    found = pairs(table(entry(90.0, 91.0)))
    assert found[0].sides[1] is None
    assert [c.text for c in to_grid(table(entry(90.0, 91.0))).rows[0]][-6:] == [
        *["—"] * 5,
        "one seed",
    ]


def test_csv_has_the_key_columns_then_paper_ours_spread_n_tier():
    text = to_csv([table(entry(90.0, 91.0, 93.0), entry(None, decayed=True))])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert text.startswith("network,optimizer,weight_decay,paper,ours,spread,n,tier,own,")
    assert rows[0] == {
        **{"network": "vgg16", "optimizer": "sgd", "weight_decay": "0", "paper": "90"},
        **{"ours": "92", "spread": "1.41421", "n": "2", "tier": "full"},
        **{"own": "", "own_spread": "", "own_n": "0", "own_setting": ""},
    }
    assert (rows[1]["paper"], rows[1]["ours"], rows[1]["spread"], rows[1]["n"]) == ("", "", "", "0")


def test_a_number_at_our_own_searchs_settings_stands_beside_and_is_marked():
    searched = replace(
        entry(92.0, 88.0, decayed=True), searched=OverSeeds((91.5,)), setting="lr 0.03"
    )
    both = table(entry(90.0, 90.0), searched)
    (row,) = [[cell.text for cell in row] for row in to_grid(both).rows]
    assert row[5:8] == ["92.00", "88.00, ‡ 91.50", "-4.00, ‡ -0.50"]
    assert row[9] == "-2.00"  # the effect of decay is that at the published settings
    assert "VGG16 SGD with decay: lr 0.03 (91.50 (one seed))" in legend(both)
    assert legend(table(entry(90.0, 90.0))) == ""
    (_, found) = csv.DictReader(io.StringIO(to_csv([both])))
    assert (found["ours"], found["own"], found["own_n"]) == ("88", "91.5", "1")
