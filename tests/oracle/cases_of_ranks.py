"""What the scripts of cases for several ranks have in common: where they meet, how they report."""

import os
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch.distributed as dist


def run_together(cases: Mapping[str, Callable[[int], None]], folder: str, rank: str, size: int):
    """Meet through a file in the folder, then run each case: prints whether it is ok, and exits."""
    dist.init_process_group(
        "gloo",
        rank=int(rank),
        world_size=size,
        init_method=f"file://{folder}/meeting",
        timeout=timedelta(minutes=10),
    )
    for name, case in cases.items():
        try:
            case(int(rank))
            print(name, "ok", flush=True)
        except Exception:
            print(name, "failed", traceback.format_exc(), flush=True)
        dist.barrier()
    os._exit(0)  # a group that is destroyed right behind its last message may wait for itself
