import os
import signal
from contextlib import nullcontext, suppress

import pytest

# Processes side by side (pytest -n): with more threads than cores they wait for each other, and the
# tests take many times as long. Before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# A shell or a CI may have set these, and they change what is printed. Before typer is imported.
for name in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "NO_COLOR", "PY_COLORS", "TERMINAL_WIDTH"):
    os.environ.pop(name, None)

# A shell that runs the tests in the background lets them, and all that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No file of a test need survive a power cut, and there are thousands to wait for the disk for.
os.fsync = lambda handle: None

# The same examples in every run, however long each takes on this machine. A lent GPU may be without
# hypothesis, which tests/gpu does not need.
with suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")


THREADS = torch.get_num_threads()


def pytest_runtest_setup():
    """Draws and threads depend on no test before: here, so that fixtures of a module follow."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)  # commands change it


@pytest.fixture
def one_thread():
    """Small matrices: more threads only wait for each other, and sums over them round otherwise."""
    torch.set_num_threads(1)


@pytest.fixture
def without_theory(monkeypatch):
    """Reports without the theory's checks, which take six seconds and have tests of their own."""
    from decaylab.report import write

    monkeypatch.setattr(write, "beside", lambda work: nullcontext(list))
