import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# What a shell or a CI may have set and printing would heed; here, before typer is imported.
for name in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "NO_COLOR", "PY_COLORS", "TERMINAL_WIDTH"):
    os.environ.pop(name, None)

# How long an example takes, and whether two take as long, is the machine's matter.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_runtest_setup():
    """What a test draws depends on no test before it: here, so that fixtures of a module follow."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smoke_runs(tmp_path_factory):
    """The records of `decaylab reproduce all --tier smoke`, made once: read them, do not write."""
    from typer.testing import CliRunner

    from decaylab.cli import app

    runs = tmp_path_factory.mktemp("smoke") / "runs"
    threads = torch.get_num_threads()
    try:
        done = CliRunner().invoke(
            app,
            ["reproduce", "all", "--tier", "smoke", "--runs", str(runs)],
            catch_exceptions=False,
        )
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    (runs / "said.txt").write_text(done.output)
    return runs
