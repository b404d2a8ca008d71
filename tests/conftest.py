import pytest
import torch
from typer.testing import CliRunner


@pytest.fixture(scope="session")
def smoke_runs(tmp_path_factory):
    """The records of `decaylab reproduce all --tier smoke`, made once: read them, do not write."""
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
