"""`decaylab claims`: what the records say about the paper's claims."""

import sys
from dataclasses import asdict
from typing import Annotated

from decaylab.cli import options
from decaylab.cli.options import option
from decaylab.cli.progress import stages
from decaylab.cli.terminal import print_json, say, warn
from decaylab.paper import TIERS, FinishedRuns
from decaylab.paper.claims import Claim, judge
from decaylab.records import RunStore
from decaylab.report.provenance import seeds_of, tiers_of
from decaylab.sweeps.run_index import indexed_runs

TierOption = Annotated[
    str | None, option("--tier", "smoke, quick, short or full; by default all with runs.")
]


def claims_command(
    tier: TierOption = None, runs: options.Runs = options.RUNS, json_output: options.Json = False
) -> None:
    """Judge the paper's claims E1-E17 from the records alone.

    Each claim is supported, contradicted, or open: too few runs, or too short a schedule. No claim
    is supported without its runs.
    """
    options.check_folder(runs)
    store = RunStore(runs)
    finished_runs = FinishedRuns(store)
    claims = []
    with stages(sys.stderr) as tell:
        indexed, left_out = indexed_runs(store)
        for name in [tier] if tier is not None else tiers_of(indexed):
            claims += judge(finished_runs, name, seeds_of(indexed), tell=tell)
    for note in dict.fromkeys([*left_out, *finished_runs.left_out]):
        warn(f"left out: {note}")
    if json_output:
        print_json([asdict(claim) for claim in claims])
        return
    if not claims:
        say(
            f"no runs of a tier ({', '.join(TIERS)}) in {runs}: make some with `decaylab reproduce"
            " table1`"
        )
    for claim in claims:
        say(_told(claim))


def _told(claim: Claim) -> str:
    spread = "" if claim.spread is None else f", spread over seeds {claim.spread:.2g}"
    lines = [
        f"{claim.id} ({claim.where}): {claim.claim}",
        f"   {claim.verdict.upper()}, tier {claim.tier}, {claim.n} runs{spread}",
    ]
    if len(claim.parts) > 1:
        lines += [f"   - {part}: {verdict}" for part, verdict in claim.parts.items()]
    lines += [f"   {text}" for text in (claim.effect, *claim.notes) if text]
    return "\n".join(lines) + "\n"
