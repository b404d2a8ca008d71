"""The commands that a diagnosis tells its reader to type, with the real folders in them.

Runs that are in memory alone have no folder: what is to be done with them is a line of Python, in
which the run is called `watched` and its baseline `baseline`.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Address:
    """Where a run lies. `folder`: "" in memory. `ours`: by our trainer, then with its `seed`.

    `status`: of a run of ours. `kept`: whether its last checkpoint is still there.
    """

    folder: str = ""
    ours: bool = False
    seed: int | None = None
    status: str = "finished"
    kept: bool = True

    @property
    def runs(self) -> str:
        """The folder that run folders lie in."""
        return str(Path(self.folder).parent)

    @property
    def again(self) -> "Address":
        """The same run, trained once more into a folder of its own."""
        runs = Path(self.folder).parent / "again"
        return replace(self, folder=str(runs / Path(self.folder).name))

    def beside(self, ending: str) -> "Address":
        """A folder next to it, that a run to come may be recorded in."""
        return Address(f"{self.folder.rstrip('/')}-{ending}")


@dataclass(frozen=True)
class Places:
    """Where the runs of a diagnosis lie, and their baselines; one of each seed.

    `left_runs`, `left_baselines`: whether finished runs of ours that belong to these lie beside
    them, but were not compared.
    """

    runs: tuple[Address, ...] = (Address(),)
    baselines: tuple[Address, ...] = ()
    left_runs: bool = False
    left_baselines: bool = False

    @property
    def run(self) -> Address:
        """The first of the runs."""
        return self.runs[0]

    @property
    def all_ours(self) -> bool:
        """Whether our trainer made all of them."""
        return all(address.ours and address.folder for address in (*self.runs, *self.baselines))


def diagnose(runs: Sequence[Address], baselines: Sequence[Address] = ()) -> str:
    """Judge these runs against these baselines."""
    if not all(address.folder for address in (*runs, *baselines)):
        if len(runs) == 1:
            return f"diagnose(watched{', baseline' if baselines else ''})"
        return "diagnose([watched, watched_2], [baseline, baseline_2])"
    against = ["--against", *(address.folder for address in baselines)] if baselines else []
    return shlex.join(["decaylab", "diagnose", *(address.folder for address in runs), *against])


def diagnose_all_seeds(run: Address) -> str:
    """Judge a run of ours with everything beside it that belongs to it."""
    return shlex.join(["decaylab", "diagnose", run.folder, "--all-seeds"])


def train_again(
    run: Address, *, decay: bool = True, seed: int | None = None, runs: str | None = None
) -> str:
    """Train a run of ours once more: without decay, with another seed, or into another folder."""
    words = ["decaylab", "train", "--config", f"{run.folder}/spec.toml", "--runs", runs or run.runs]
    words += [] if decay else ["--decay", "none", "--weight-decay", "0"]
    return shlex.join([*words, *([] if seed is None else ["--seed", str(seed)])])


def suggest(run: Address) -> str:
    """A decay that acts within the budget."""
    if not run.folder:
        return "decaylab.diagnosis.suggest(watched)"
    return shlex.join(["decaylab", "advise", "suggest", run.folder])


def schedule(run: Address) -> str:
    """The learning rates that do without decay what it did."""
    if not run.folder:
        return 'decaylab.diagnosis.equivalent_schedule(watched).save("schedule.csv")'
    return shlex.join(["decaylab", "advise", "schedule", run.folder, "--out", "schedule.csv"])


def probe(run: Address) -> str:
    """Measure the last checkpoint of a run of ours and record it."""
    return shlex.join(["decaylab", "probe", run.folder, "--record"])


def attribute(run: Address) -> str:
    """Separate the mechanisms by experiment; of other people's loops, docs/attribution.md."""
    return shlex.join(["decaylab", "attribute", run.folder])
