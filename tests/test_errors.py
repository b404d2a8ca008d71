"""The words of each family of errors, and names that are close to a known one."""

import math
import pickle
from pathlib import Path

import pytest
import torch

from decaylab import errors
from decaylab.errors import (
    AT_LEAST_ONE,
    FRACTION,
    BadValue,
    Conflict,
    Damaged,
    DecaylabError,
    Failed,
    Lacks,
    Mismatch,
    Misplaced,
    NameTaken,
    NoFolder,
    NotFinished,
    NotInstalled,
    NotRead,
    NotWritten,
    OutOfRange,
    Range,
    UnknownName,
    WrongType,
    did_you_mean,
    naming,
    path_did_you_mean,
)

NETWORKS = ["mlp", "vgg11", "vgg16", "resnet32"]
PATH = Path("runs/rows.json")
UNREADABLE = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")
WORDS = [
    (BadValue("--only", "x", "KEY=VALUE"), "--only must be KEY=VALUE, not 'x'"),
    (
        OutOfRange("samples", 1, Range(at_least=2), "one draw has no standard error"),
        "samples must be at least 2, not 1: one draw has no standard error",
    ),
    (WrongType("model", [], "a torch module"), "model must be a torch module, not a list"),
    (WrongType("model", 1, "a torch module"), "model must be a torch module, not an int"),
    (
        UnknownName("network", "vgg61", NETWORKS),
        "unknown network 'vgg61' (did you mean vgg16?): choose one of mlp, vgg11, vgg16, resnet32",
    ),
    (UnknownName("sweep", "a", []), "unknown sweep 'a': there are none"),
    (NameTaken("probe", "gap"), "there is already a probe 'gap': choose another name"),
    (Misplaced(["damping"], "K-FAC"), "damping applies only to K-FAC: leave it out"),
    (
        Misplaced(["--a", "--b"], "one process"),
        "--a and --b apply only to one process: leave them out",
    ),
    (
        Misplaced(["--a"], "one process", "give --jobs 1"),
        "--a applies only to one process: give --jobs 1",
    ),
    (
        Conflict(["a", "b"], "both do"),
        "a and b cannot be combined, because both do: leave one out",
    ),
    (
        Mismatch("shape", {"the mask": [3], "the rows": [6]}, "give one entry per row"),
        "the mask ([3]) and the rows ([6]) differ in shape: give one entry per row",
    ),
    (Lacks("the net", "weights", "give another"), "the net has no weights: give another"),
    (NoFolder(Path("/nowhere"), "make it"), "there is no folder /nowhere: make it"),
    (NoFolder(Path(__file__), "move it"), f"{__file__} is not a folder: move it"),
    (Damaged(PATH, "cut off", "replace it"), "runs/rows.json is damaged (cut off): replace it"),
    (
        Damaged(PATH, ValueError("no row\nbut two"), "replace it"),
        "runs/rows.json is damaged (ValueError: no row): replace it",
    ),
    (
        NotRead(Path(__file__).with_name("test_erors.py"), FileNotFoundError(2, "no file"), "look"),
        f"{Path(__file__).with_name('test_erors.py')} cannot be read (no file)"
        f" (did you mean {__file__}?): look",
    ),
    (NotRead("a", UNREADABLE, "fix"), "a cannot be read (it is not UTF-8 text): fix"),
    (
        UnknownName("run", "a-2", ["a-1"], "`runs list` shows them"),
        "unknown run 'a-2' (did you mean a-1?): `runs list` shows them",
    ),
    (Damaged(PATH, EOFError(), "replace it"), "runs/rows.json is damaged (EOFError): replace it"),
    (
        NotWritten(PATH, "full", "make room"),
        "runs/rows.json cannot be written (full): make room",
    ),
    (NotFinished("a-1", "train it"), "run a-1 is not finished: train it"),
    (Failed("it", KeyError("lr"), "set it"), "it failed (KeyError: 'lr'): set it"),
    (
        NotInstalled("pyarrow", "data", "a parquet file"),
        "a parquet file needs pyarrow: pip install 'decaylab[data]'",
    ),
]


@pytest.mark.parametrize(("error", "words"), WORDS, ids=lambda value: type(value).__name__)
def test_the_words_of_each_family(error, words):
    assert str(error) == words
    again = pickle.loads(pickle.dumps(error))  # as between processes
    assert (type(again), vars(again), str(again)) == (type(error), vars(error), words)


def test_each_family_has_its_words_tested():
    families = {kind for name, kind in vars(errors).items() if _is_family(kind) and name[0] != "_"}
    assert families == {type(error) for error, _ in WORDS}


def _is_family(kind):
    return (
        isinstance(kind, type)
        and issubclass(kind, errors.TypedError)
        and kind is not errors.TypedError
    )


def test_an_error_names_its_place_and_stays_what_it_is():
    with (
        pytest.raises(UnknownName, match=r"^spec\.toml: unknown") as caught,
        naming("spec.toml"),
    ):
        raise UnknownName("key", "x", ["y"])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(DecaylabError, match=r"^a\.toml: no$"), naming("a.toml"):
        raise DecaylabError("no")


def test_what_would_steer_a_terminal_is_escaped():
    assert str(DecaylabError("no \x1b[2J")) == "no \\x1b[2J"
    assert str(NotFinished("a\x1b[2J", "train it")) == "run a\\x1b[2J is not finished: train it"


@pytest.mark.parametrize("value", [-1, -1e-9, 1, math.nan, math.inf])
def test_a_number_out_of_range_is_refused(value):
    with pytest.raises(OutOfRange) as caught:
        FRACTION.check("momentum", value)
    assert caught.value.name == "momentum"
    assert caught.value.value is value


def test_the_bounds_of_a_range():
    for inside in (0, 0.5):
        FRACTION.check("momentum", inside)
    assert 1 in AT_LEAST_ONE
    assert (2 in Range(above=2, at_most=3), 3 in Range(above=2, at_most=3)) == (False, True)


def test_a_long_value_and_many_choices_are_cut():
    assert len(str(BadValue("name", "x" * 10_000, "short"))) < 200
    assert "\n" not in str(BadValue("loss", torch.eye(2), "a number"))
    listed = str(UnknownName("layer", "y", [f"layer{n}" for n in range(1000)]))
    assert "layer0, layer1" in listed
    assert listed.endswith(", ...")
    assert len(listed) < 1000


@pytest.mark.parametrize(
    ("name", "near"),
    [("vgg61", "vgg16"), ("VGG16", "vgg16"), ("resnet23", "resnet32"), ("mpl", "mlp")],
)
def test_the_nearest_name_is_offered(name, near):
    assert near in did_you_mean(name, NETWORKS)
    assert f"(did you mean {near}?)" in str(UnknownName("network", name, NETWORKS))


@pytest.mark.parametrize("name", ["", "transformer", "x"])
def test_nothing_is_offered_for_what_is_far(name):
    assert did_you_mean(name, NETWORKS) == ""


def test_a_path_is_compared_with_what_lies_beside_it(tmp_path):
    (tmp_path / "results").mkdir()
    assert str(tmp_path / "results") in path_did_you_mean(tmp_path / "reslts")
    assert path_did_you_mean(tmp_path / "elsewhere" / "x") == ""
    (tmp_path / "results" / "decayed").mkdir()
    assert str(tmp_path / "results" / "decayed") in path_did_you_mean(tmp_path / "reslts/decayed")
