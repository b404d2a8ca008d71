import json
import sys

import pytest
from refusals import refused
from typer.testing import CliRunner

from decaylab.cli import app
from decaylab.errors import BadValue, Failed, Lacks, UnknownName

runner = CliRunner()
MODULE = """
from oracle.plain_kfac import KFAC

def right(model):
    return KFAC(model, lr=0.1, outputs="exact")

def twice(model):
    return KFAC(model, lr=0.1, outputs="exact", curvature_scale=2.0)

class Wrapped:
    def __init__(self, model):
        self.inner = right(model)
        self.param_groups, self.step = self.inner.param_groups, self.inner.step

NOTHING = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "audited_optimizers.py").write_text(MODULE)
    (tmp_path / "broken_optimizers.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "audited_optimizers"
    sys.modules.pop("audited_optimizers", None)


def test_a_right_one_and_a_wrong_one(module):
    right = runner.invoke(app, ["audit", f"{module}:right", "--curvature", "fisher"])
    assert right.exit_code == 0, right.output
    assert right.stdout.endswith("it passes\n")
    in_part = runner.invoke(app, ["audit", f"{module}:Wrapped"])
    assert in_part.exit_code == 0
    assert in_part.stdout.endswith("it passes, but 3 of 15 checks could not be made\n")
    wrong = runner.invoke(app, ["audit", f"{module}:twice", "--json"])
    assert wrong.exit_code == 1
    report = json.loads(wrong.stdout)
    assert report["passed"] is False
    bad = {check["name"]: check["measured"] for check in report["checks"] if not check["passed"]}
    assert bad["Linear: constant"] == pytest.approx(2.0, rel=1e-3)
    meant = runner.invoke(app, ["audit", f"{module}:twice", "--curvature-scale", "2"])
    assert meant.exit_code == 0, meant.output


@pytest.mark.parametrize(
    ("arguments", "kind", "fields"),
    [
        ("kfac", BadValue, {"name": "what to audit", "value": "kfac"}),
        ("no_such_module:kfac", Failed, {"what": "importing no_such_module"}),
        ("broken_optimizers:kfac", Failed, {"what": "importing broken_optimizers"}),
        ("audited_optimizers:missing", Lacks, {"what": "function 'missing'"}),
        ("audited_optimizers:NOTHING", Lacks, {"what": "function 'NOTHING'"}),
        ("torch.optim:SGD", Failed, {"what": "building the optimizer"}),
        ("audited_optimizers:right --curvature hessian", UnknownName, {"kind": "curvature"}),
    ],
)
def test_bad_input_is_one_sentence(module, arguments, kind, fields):
    error = refused("audit", *arguments.split())
    assert type(error) is kind
    assert fields.items() <= vars(error).items()
