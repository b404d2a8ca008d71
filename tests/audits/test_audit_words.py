"""The sentences of the K-FAC audit, all of them."""

from decaylab.audits import Audit, AuditCheck, Reason

EXAMPLES = {
    Reason.NEAREST_BLOCK: {"curvature": "fisher", "sharing": "expand"},
    Reason.NO_KNOWN_BLOCK: {"curvature": "fisher", "sharing": "reduce"},
    Reason.OTHER_CURVATURE: {"curvature": "empirical-fisher", "asked": "fisher"},
    Reason.DIRECTION: {"sine": 0.0012},
    Reason.UNKNOWN_DIRECTION: {"sine": 0.31},
    Reason.POWER_OFF: {"axis": "positions T", "power": -1.0, "plain": True, "known": True},
    Reason.NO_POWER_LAW: {"off": 0.7},
    Reason.CONSTANT_OFF: {"factor": 2.0},
    Reason.PATCHES: {"sine": 1e-9},
    Reason.DAMPING: {"kind": "added", "damping": 0.01, "error": 0.002, "others": ["factored"]},
    Reason.BIAS_OFF: {"weight_error": 0.1, "bias_error": 1.0, "factor": 2.0},
}
WORDS = """\
K: fisher block, expand, not sampled
  WRONG       NEAREST_BLOCK: nearest to the fisher block, expand
  WRONG       NO_KNOWN_BLOCK: no known block; the nearest is the fisher block, reduce
  WRONG       OTHER_CURVATURE: it is the empirical-fisher matrix, not the fisher one that was asked for
  WRONG       PLAIN_GRADIENTS: the steps are plain gradients: no curvature is used
  WRONG       UPHILL: the steps go up the loss: their sign is wrong
  ok          DIRECTION: sine of the angle to the block's step 0.0012
  WRONG       UNKNOWN_DIRECTION: sine of the angle to the block's step 0.31: no known block gives these directions
  WRONG       POWER_RIGHT: right at every size
  WRONG       POWER_OFF: the curvature is off by T^-1 (a mean over positions where a sum is meant: the factor T is missing)
  WRONG       NO_POWER_LAW: the ratios are not powers of the sizes (off by 70%)
  WRONG       CONSTANT_RIGHT: right
  WRONG       CONSTANT_OFF: the curvature is 2x what it should be
  WRONG       PATCHES: kernel 2, stride 2: sine of the angle 1e-09
  WRONG       MEND_FIRST: not checked: fix the above first
  WRONG       MEND_DAMPING_FIRST: not checked: fix the damping first, which is part of it
  WRONG       DAMPING_UNKNOWN: the damping is not known: pass audit(..., damping=...)
  WRONG       DAMPING: nearest to added, lambda 0.01: the step is off by 0.002 of its length (factored would pass too)
  WRONG       JOINT_BIAS: weight and bias are one block
  WRONG       BIAS_OFF: with a bias the weight's step is off by 0.1 and the bias's by 1 of its length (it is 2x the block's)"""  # noqa: E501


def test_every_reason_has_its_sentence():
    checks = [AuditCheck(r.name, r is Reason.DIRECTION, r, EXAMPLES.get(r, {})) for r in Reason]
    assert str(Audit("K", "fisher", "expand", False, tuple(checks))) == WORDS


def test_the_summary():
    def summary(*passed):
        checks = tuple(AuditCheck("a", each, Reason.POWER_RIGHT) for each in passed)
        return Audit("K", "fisher", "expand", False, checks).summary

    assert summary(False, True, True, None) == "it does not pass"
    assert summary(True, True, True, True) == "it passes"
    assert summary(True, None, True, True, None) == (
        "it passes, but 2 of 5 checks could not be made"
    )
