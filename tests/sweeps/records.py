"""What a folder of runs holds, but for times and devices."""

from decaylab.records import RunStore


def numbers(runs):
    """Everything recorded, but for times."""
    found = {}
    for folder in RunStore(runs).runs():
        rows = folder.rows().rows
        timeless = {(r.step, r.name): (r.epoch, r.value) for r in rows if r.name != "train/seconds"}
        found[folder.id] = (folder.manifest().status, folder.spec_text(), timeless)
    return found
