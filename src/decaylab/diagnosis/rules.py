"""Every threshold of diagnosis and advice, in one place, each with what it was chosen by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """Thresholds. Factors are above one, parts between nought and one."""

    # -- verdicts
    # Learning rates are searched by factors of about three, and 1.25 is the least that anybody
    # would notice; two seeds of one run differ by a few per cent, so 1.1 is none.
    acts: float = 1.25
    nothing: float = 1.1
    # |J|^2 of two seeds differs by tens of per cent, and the paper's effects are 3 to 30 (Table 2).
    jacobian_acts: float = 1.5
    jacobian_nothing: float = 1.2
    # Where records scatter so that the mean of the logarithm, give or take so many of its standard
    # errors, reaches from no effect to one, nothing is said.
    standard_errors: float = 2.0
    # Early records show the start, not the decay: this part of them, the last, is judged.
    judged_share: float = 0.5
    # Decay that has taken less of the weights cannot have done much.
    too_little_exposure: float = 0.05
    # Where so little is left of a norm, decay has won over the gradients.
    collapsed: float = 1e-3
    # Weights this many times as large as they began, and as one each: the run has diverged.
    exploded: float = 100.0
    # Per cent of the outputs per per cent of a layer's size, below which that hardly matters: a
    # head has 1, a scale-invariant layer 0.
    size_little: float = 0.25
    # How far that is off: of a small GPT's layers the logarithm has a standard deviation of 0.19
    # over batches and 0.23 over seeds.
    size_doubt: float = 1.5
    # A rotation as near as this to the law's equilibrium has come to rest there.
    settled: float = 1.25
    # Second-order shares: from here on damping changes little; below this K-FAC steps as SGD does;
    # two seeds differ by so much (results/demo).
    damping_negligible: float = 0.9
    damping_dominates: float = 0.5
    same_share: float = 0.02
    # Of what is logged in training, the last part is the outcome; intervals are of this confidence.
    outcome_tail: float = 0.1
    # What differs by less, in one seed, ended slightly better or worse.
    slight: float = 0.01
    confidence: float = 0.95

    # -- reconstruction from one run
    # From this exposure on SGD's reconstruction is a lower estimate. In the pairs of runs of
    # results/ (and a GIN and a U-Net), layers with an exposure of 1.5 or less have 0.94 to 1.10
    # times the factor of both runs, those with 4.7 or more (184 layers, 8 runs) 0.30 to 0.95 times;
    # Adam's have 0.88 to 1.14 times up to 7.8.
    lower_estimate: float = 2.0
    # What Adam remembers depends on the norms that it makes: rounds until both agree (to 1e-3).
    remembered_rounds: int = 4
    # What decay takes of the weights while K-FAC's factors remember them, times its second-order
    # share (benchmarks/schedules.py, part one-run).
    remembered_too_much: float = 0.7
    # The part of the records of a norm that must have K-FAC's share, which falls from one to a few
    # per cent: from its two ends alone, reconstructions were up to 160 times off.
    shares_needed: float = 0.5

    # -- which runs belong together
    # Last records nearer than this: one length. Norms nearer than this: one start, of two seeds.
    same_length: float = 0.9
    same_start: float = 1.25
    # Root mean squares of inputs nearer than this: of one kind, as batches of one data set are.
    same_inputs: float = 1.25
    # Learning rates nearer than this part of the largest are one: schedules of nearly one length.
    same_lr: float = 0.01
    # Gradients larger than this times the bound of a clip are not clipped to it (16 bits round).
    same_bound: float = 1.05
    # While the exposure is below `early`, squared norms of true pairs leave the range that decay
    # explains by less than this (those of results/ do).
    same_growth: float = 1.25
    early: float = 1.0

    # -- where an optimizer leaves its law
    # The radial part of the gradient of a scale-invariant layer: rounding gives up to 0.02 (16
    # bits), and a layer that is not has about 1.
    along: float = 0.1
    # Sizes of gradients as near as this, at so many records, are at the bound of a clip; clipping
    # at fewer of the records, or of a smaller part of the gradient, changes little.
    same_gradient: float = 1e-4
    clipped_records: int = 3
    seldom: float = 0.1
    # From such a part of the root of the second moment on eps counts: factors were 12 % off.
    eps: float = 0.1

    # -- bursts: intervals in which the norm fell in a row, and by how much it grows in the next
    burst_falling: int = 5
    burst_growth: float = 1.2

    # -- advice
    # Learning rates within such a factor count as one: those at the top of a cosine.
    one_rate: float = 1.5
    # Nobody raises a learning rate over a run by more than this.
    raised_at_most: float = 1e3
    # How much the middle counts, times the scatter of log G: ten records of it.
    scattered: float = 10.0
    # From such a factor on a suggestion may be off, and layers disagree.
    rough: float = 2.0
    # A weight that a step lengthens by itself cannot be held: s >= 1/2.
    too_strong: float = 0.5
    # Where decay takes this part while steps still agree, Lion turned 20 % further than was said.
    mixed: float = 0.25
    # A norm farther from its balance has not come to rest; so far from it, the growth that was seen
    # says little.
    travelling: float = 1.25
    far: float = 10.0
    # The same decay takes as much of layers whose rates are as near as this.
    alike: float = 1.05
    # A decay acts within a budget of so many of its timescales 1/(2 s (1 - e)), in which the
    # distance from its balance falls to exp(-2).
    timescales: float = 2.0


RULES = Rules()
