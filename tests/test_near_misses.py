"""A name that is close to a known one is answered with it."""

import pytest

from decaylab.errors import did_you_mean, path_did_you_mean, unknown

NETWORKS = ["mlp", "vgg11", "vgg16", "resnet32"]


@pytest.mark.parametrize(
    ("name", "near"),
    [("vgg61", "vgg16"), ("VGG16", "vgg16"), ("resnet23", "resnet32"), ("mpl", "mlp")],
)
def test_the_nearest_name_is_offered(name, near):
    assert near in did_you_mean(name, NETWORKS)
    assert near in str(unknown("network", name, NETWORKS))


@pytest.mark.parametrize("name", ["", "transformer", "x"])
def test_nothing_is_offered_for_what_is_far(name):
    assert did_you_mean(name, NETWORKS) == ""


def test_a_path_is_compared_with_what_lies_beside_it(tmp_path):
    (tmp_path / "results").mkdir()
    assert str(tmp_path / "results") in path_did_you_mean(tmp_path / "reslts")
    assert path_did_you_mean(tmp_path / "elsewhere" / "x") == ""
    (tmp_path / "results" / "decayed").mkdir()
    assert str(tmp_path / "results" / "decayed") in path_did_you_mean(tmp_path / "reslts/decayed")
