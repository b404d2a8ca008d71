"""Every threshold of diagnosis and advice, in one place, each with what it was chosen by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """Thresholds. Factors are above one, parts between nought and one.

    Verdicts:
        acts, nothing: a learning rate is searched by factors of about three and a factor of 1.25 in
            it is the least that anybody would notice; two seeds of one run differ by a few per
            cent, so 1.1 is none.
        jacobian_acts, jacobian_nothing: |J|^2 of two seeds differs by tens of per cent, and the
            paper's effects are 3 to 30 (Table 2).
        judged_share: decay works over 1/(lr wd) steps and the early records show the start, not the
            decay: this part of the records, the last, is judged.
        too_little_exposure: while decay has taken less than a twentieth of the weights, it cannot
            have done much.
        collapsed: where so little is left of a norm, decay has won over the gradients.
        size_little: per cent by which the logits change per per cent of a layer's size. A head has
            1 and a scale-invariant layer 0; what stands below hardly matters by its size.
        settled: a rotation as near as this to the law's equilibrium has come to rest there.
        damping_negligible: nine tenths of the directions are second-order: what damping does to
            the rest changes little. damping_dominates: less than half are: K-FAC steps as SGD does.
        same_share: second-order shares of two seeds differ by so much (results/demo).

    Reconstruction from one run:
        remembered_rounds: what Adam remembers depends on the norms that it makes: rounds until both
            agree (to 1e-3).
        remembered_too_much: what decay takes of the weights while K-FAC's factors remember them,
            times its second-order share (benchmarks/schedules.py, part one-run).
        shares_needed: how K-FAC's pushes depend on the norm hangs on its share, which falls from
            one to a few per cent. From its two ends alone, reconstructions were up to 160 times
            off: so many of the records of a norm must have it.

    Which runs belong together:
        same_length: runs whose last records are nearer than this are of one length.
        same_start: two seeds of one layer begin with norms that are nearer.
        same_growth, early: while the exposure is below the second, the squared norms of true pairs
            leave the range that decay explains by less than the first (those of results/ do).

    Where an optimizer leaves its law:
        along: radial_gradient is below it before decay acts, if a layer is scale-invariant:
            rounding gives up to 0.02 (16 bits), and a layer that is not has about 1.
        same_gradient, clipped_records: sizes of gradients as near as this, at so many records, are
            at the bound of a clip. seldom: clipping at fewer of the records, or of a smaller part
            of the gradient, changes little.
        eps: from such a part of the root of the second moment on eps counts: factors were 12 % off.

    Bursts:
        burst_falling: intervals in which the norm fell, one after the other. burst_growth: the
            least factor by which it grows in the next.

    Advice:
        one_rate: learning rates within such a factor count as one: those at the top of a cosine.
        scattered: how much the middle counts, times the scatter of log G: ten records of it.
        rough: from such a factor on it is said that a suggestion may be off.
        too_strong: a weight that a step lengthens by itself cannot be held: s >= 1/2.
        mixed: where decay takes this part of the weights while steps still agree, Lion turned them
            20 % further than was said.
        travelling: a norm farther from its balance has not come to rest.
        alike: the same decay takes as much of layers whose rates are as near as this.
        far: so far from the norms that were seen, the growth seen there says little.
        timescales: a decay acts within a budget of so many of its timescales 1/(2 s (1 - e)), in
            which the distance from its balance falls to exp(-2).
    """

    acts: float = 1.25
    nothing: float = 1.1
    jacobian_acts: float = 1.5
    jacobian_nothing: float = 1.2
    judged_share: float = 0.5
    too_little_exposure: float = 0.05
    collapsed: float = 1e-3
    size_little: float = 0.25
    settled: float = 1.25
    damping_negligible: float = 0.9
    damping_dominates: float = 0.5
    same_share: float = 0.02
    remembered_rounds: int = 4
    remembered_too_much: float = 0.7
    shares_needed: float = 0.5
    same_length: float = 0.9
    same_start: float = 1.25
    same_growth: float = 1.25
    early: float = 1.0
    along: float = 0.1
    same_gradient: float = 1e-4
    clipped_records: int = 3
    seldom: float = 0.1
    eps: float = 0.1
    burst_falling: int = 5
    burst_growth: float = 1.2
    one_rate: float = 1.5
    scattered: float = 10.0
    rough: float = 2.0
    too_strong: float = 0.5
    mixed: float = 0.25
    travelling: float = 1.25
    alike: float = 1.05
    far: float = 10.0
    timescales: float = 2.0
    outcome_tail: float = 0.1
    confidence: float = 0.95


RULES = Rules()
