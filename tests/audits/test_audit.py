"""The audit finds each mistake, names it with its power, and passes what is right."""

import math
from importlib import import_module

import pytest
import torch
from audits.wrong_kfac import HookedKFAC
from oracle.plain_kfac import KFAC
from refusals import refuses

import decaylab
from decaylab.audits import Reason, audit
from decaylab.audits.reference import CURVATURES, Case, reference_factors
from decaylab.errors import BadValue, Failed, Lacks, OutOfRange, UnknownName, WrongType
from decaylab.optim.options import KFACOptions


def made(**mistakes):
    return lambda model: HookedKFAC(model, **mistakes)


def failed(report):
    return [check.name for check in report.checks if check.passed is False]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_ours_passes(curvature, sharing):
    settings = {"outputs": "exact"} if curvature != "empirical-fisher" else {}
    report = audit(
        lambda model: KFAC(model, lr=0.1, curvature=curvature, sharing=sharing, **settings),
        curvature=curvature,
    )
    assert report.passed, str(report)
    assert (report.curvature, report.sharing, report.sampled) == (curvature, sharing, False)
    assert all(check.passed is True for check in report.checks)
    assert report["damping"].measured < 1e-8


@pytest.mark.parametrize("curvature", ["fisher", "gauss-newton"])
def test_ours_passes_sampled(curvature):
    scale = 2.0 if curvature == "gauss-newton" else 1.0
    report = audit(
        lambda model: KFAC(model, lr=0.1, curvature=curvature, curvature_scale=scale),
        curvature=curvature,
        curvature_scale=scale,
    )
    assert report.passed, str(report)
    assert report.sampled
    assert "estimated from samples" in report.title
    # the noise is larger than what tells the two apart
    damping = report["damping"].data
    named = " ".join([damping["kind"], *damping["others"]])
    assert all(kind in named for kind in ("factored", "added"))


def test_samples_by_a_seed_of_its_own_are_samples():
    """In another order the examples get other samples; the block is the same."""
    options = KFACOptions(seed=0)
    report = audit(lambda model: KFAC(model, lr=0.1, options=options), curvature="fisher")
    assert report.sampled
    assert report.passed, str(report)


def test_samples_of_convolutions_alone_are_samples():
    report = audit(made(noisy=0.1), curvature="fisher")
    assert report.sampled
    assert report.passed, str(report)


def test_samples_of_a_large_curvature_are_samples():
    """However short the steps are."""
    report = audit(lambda model: KFAC(model, lr=0.1, curvature_scale=1e4), curvature_scale=1e4)
    assert report.sampled
    assert report.passed, str(report)


def test_an_independent_right_one_passes():
    report = audit(made(), curvature="fisher")
    assert report.passed, str(report)


MISTAKES = {
    "missing 1/B": (lambda B, T, s: B, {"B": 1}, "a sum over the batch"),
    "1/B twice": (lambda B, T, s: 1 / B, {"B": -1}, "divided by the batch once too often"),
    "missing T": (lambda B, T, s: 1 / T, {"T": -1}, "the factor T is missing"),
    "1/T^2": (lambda B, T, s: T**-2.0, {"T": -2}, "T^-2"),
    "1/(B^2 T^5)": (lambda B, T, s: B**-2.0 * T**-5.0, {"B": -2, "T": -5}, "T^-5"),
    "input pixels for positions": (lambda B, T, s: s**2, {"stride": 2}, "stride^2"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_power_is_found(name):
    factor, powers, said = MISTAKES[name]
    report = audit(made(factor=factor), curvature="fisher")
    axes = {"B": "batch size B", "T": "positions T", "stride": "stride"}
    wrong = {f"Conv2d: {axes[axis]}" for axis in powers}
    wrong |= {"Linear: batch size B"} if "B" in powers else set()
    assert set(failed(report)) == wrong, str(report)
    for axis, power in powers.items():
        assert report[f"Conv2d: {axes[axis]}"].measured == pytest.approx(power, abs=0.02)
    assert said in str(report)
    assert report["damping"].passed is None


def test_a_constant_factor_is_found():
    report = audit(made(factor=lambda B, T, s: 2.0))
    assert failed(report) == ["Linear: constant", "Conv2d: constant"]
    assert report["Linear: constant"].measured == pytest.approx(2.0, rel=1e-3)
    assert audit(made(factor=lambda B, T, s: 2.0), curvature_scale=2.0).passed


def test_the_empirical_fisher_is_told_from_the_true_one():
    report = audit(made(labels="data"), curvature="fisher")
    assert failed(report) == ["curvature"]
    assert report["curvature"].reason is Reason.OTHER_CURVATURE
    assert report["curvature"].data == {"curvature": "empirical-fisher", "asked": "fisher"}
    assert audit(made(labels="data")).passed


def test_a_doubled_bias_is_found():
    report = audit(made(bias="doubled"), curvature="fisher")
    assert failed(report) == ["Linear: bias", "Conv2d: bias"]
    assert report["Linear: bias"].measured == pytest.approx(2.0, rel=1e-6)
    assert report["Linear: bias"].reason is Reason.BIAS_OFF


def test_another_damping_than_it_says_is_found():
    report = audit(made(damping=1e-2, damping_used=1e-4), curvature="fisher")
    assert "damping" in failed(report)
    assert not {"Linear: constant", "Conv2d: batch size B"} & set(failed(report))
    unknown = audit(lambda model: _without_damping(model))
    assert unknown.passed
    assert unknown["damping"].reason is Reason.DAMPING_UNKNOWN
    assert audit(lambda model: _without_damping(model), damping=1e-3)["damping"].passed


@pytest.mark.parametrize(
    ("damped", "kind"), [("plain", "factored without pi"), ("each", "added to each factor")]
)
def test_a_damping_of_the_factors_is_no_mistake(damped, kind):
    """It is much beside S at these sizes, and must not be taken for a wrong power."""
    report = audit(made(damped=damped, damping=1e-2), curvature="fisher")
    assert report.passed, str(report)
    assert all(check.passed is True for check in report.checks)
    assert report["damping"].data["kind"].startswith(kind)
    assert report["damping"].data["damping"] == 1e-2


def test_where_the_damping_is_wrong_the_bias_is_not_accused():
    report = audit(made(damping=1e-1, damping_used=1e-3), curvature="fisher")
    assert failed(report) == ["damping"]
    assert report["Linear: bias"].reason is Reason.MEND_DAMPING_FIRST


class ThroughSGD(torch.optim.SGD):
    """A right K-FAC whose directions torch's SGD takes as gradients."""

    def __init__(self, model, **settings):
        super().__init__(model.parameters(), lr=0.1, **settings)
        self.inner = HookedKFAC(model, lr=1.0)
        self.damping = self.inner.damping

    @torch.no_grad()
    def step(self):
        parameters = self.param_groups[0]["params"]
        before = [p.clone() for p in parameters]
        self.inner.step()
        for p, old in zip(parameters, before, strict=True):
            p.grad = old - p
            p.copy_(old)
        super().step()


@pytest.mark.parametrize("settings", [{"nesterov": True}, {"dampening": 0.5}])
@pytest.mark.parametrize("steps", [1, 5])
def test_the_momentum_of_torch_is_no_mistake(settings, steps):
    report = audit(lambda model: ThroughSGD(model, momentum=0.9, **settings), steps=steps)
    assert report.passed, str(report)
    assert report["damping"].measured < 1e-8


@pytest.mark.parametrize(
    "kind", [ThroughSGD, lambda m, **of: torch.optim.SGD(m.parameters(), **of)]
)
def test_steps_up_the_loss_are_no_block_of_another_name(kind):
    report = audit(lambda model: kind(model, maximize=True))
    assert failed(report) == ["curvature"]
    assert report["curvature"].reason is Reason.UPHILL
    assert report.title.endswith("no known curvature block")


def test_powers_of_no_block_are_not_explained():
    report = audit(lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1))
    assert report["Conv2d: positions T"].measured == pytest.approx(1.0, abs=0.1)
    assert report["Conv2d: positions T"].reason is Reason.POWER_OFF
    assert not report["Conv2d: positions T"].data["known"]


def test_powers_that_are_none_are_not_explained():
    report = audit(made(factor=lambda B, T, s: B**-0.75), curvature="fisher")
    assert report["Linear: batch size B"].reason is Reason.POWER_OFF
    assert report["Linear: batch size B"].data["power"] == pytest.approx(-0.75)
    assert not report["Linear: batch size B"].data["plain"]


def test_a_step_that_fails_is_one_sentence():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no such layer")

    with refuses(Failed, reason="RuntimeError: no such layer"):
        audit(lambda model: Failing(model.parameters(), lr=0.1))


class LinearOnly(torch.optim.SGD):
    """A K-FAC that is half done: it leaves convolutions alone."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim > 2:
                parameter.grad = None
        super().step(closure)


def _without_lr(model):
    optimizer = HookedKFAC(model)
    del optimizer.param_groups[0]["lr"]
    return optimizer


def _without_damping(model):
    optimizer = HookedKFAC(model)
    del optimizer.damping
    return optimizer


def test_directions_that_no_block_gives():
    report = audit(made(mixed=True), curvature="fisher")
    assert {"Linear: direction", "Conv2d: direction", "Linear: input scale"} <= set(failed(report))


def test_a_block_that_is_nearest_by_chance_is_not_named_as_its_own():
    report = audit(lambda model: torch.optim.Adam(model.parameters(), lr=0.1))
    assert "curvature" in failed(report)
    assert report["curvature"].reason is Reason.NO_KNOWN_BLOCK
    assert report.title == "Adam: no known curvature block"


def test_plain_gradients():
    report = audit(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert failed(report) == ["curvature"]
    assert report["curvature"].reason is Reason.PLAIN_GRADIENTS


@pytest.mark.parametrize(
    ("factory", "kind"),
    [
        (lambda model: KFAC(model, lr="high"), Failed),
        (lambda model: import_module("no_such_kfac"), Failed),
        (lambda model: "nothing", WrongType),
    ],
)
def test_what_is_not_an_optimizer_cannot_be_audited(factory, kind):
    with pytest.raises(kind):
        audit(factory)


@pytest.mark.parametrize(
    ("factory", "kind", "fields"),
    [
        (
            lambda model: KFAC(model, lr=0.1, weight_decay=0.1),
            BadValue,
            {"value": 0.1, "wanted": 0},
        ),
        (lambda model: KFAC(model, lr=0.1, kl_clip=0.2), BadValue, {"value": 0.2, "wanted": None}),
        (decaylab.KFAC, BadValue, {"value": "rms", "wanted": "none"}),
        (
            lambda model: KFAC(model, damping_scaling="trace"),
            BadValue,
            {"value": "trace", "wanted": "fixed"},
        ),
        (lambda model: HookedKFAC(model, lr=0.0), Lacks, {"what": "effect on Linear at batch 16"}),
        (lambda model: LinearOnly(model), Lacks, {"what": "effect on Conv2d at batch 8"}),
        (
            lambda model: torch.optim.SGD(model[3].parameters(), lr=0.1),
            Lacks,
            {"what": "first layer of the model"},
        ),
        (lambda model: _without_lr(model), Lacks, {"what": "lr"}),
    ],
)
def test_what_cannot_be_audited(factory, kind, fields):
    with refuses(kind, **fields):
        audit(factory)


def test_bad_arguments():
    with refuses(UnknownName, name="hessian"):
        audit(made(), curvature="hessian")
    with refuses(OutOfRange, name="steps", value=0):
        audit(made(), steps=0)
    for bad in (0.0, -1.0, math.nan, math.inf):
        for name in ("damping", "curvature_scale"):
            with refuses(OutOfRange, name=name, value=bad):
                audit(made(), **{name: bad})


def test_the_reference_is_the_exact_block_where_kfac_is_exact():
    """Batch one, one position: the three blocks are one."""
    model, inputs, labels = Case("Linear", 1, bias=True).build()
    for curvature in CURVATURES:
        found = reference_factors(Case("Linear", 1, bias=True), model, inputs, labels, curvature)
        blocks = [factors.block for factors in found.values()]
        assert blocks[0].abs().max() > 1e-3
        assert all(torch.allclose(block, blocks[0], atol=1e-12) for block in blocks)
