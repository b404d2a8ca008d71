"""The benchmark of a K-FAC step runs, and its parts are those of the step."""

import importlib.util
import json
from pathlib import Path

FILE = Path(__file__).parents[2] / "benchmarks" / "kfac_step.py"


def test_the_benchmark_prints_multiples_and_parts(capsys):
    spec = importlib.util.spec_from_file_location("kfac_step", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = "--device cpu --networks vgg11 --width 0.05 --batch-size 4 --repeats 2"
    module.main([*options.split(), "--json"])
    result = json.loads(capsys.readouterr().out)
    times, parts = result["milliseconds"], result["parts_milliseconds"]
    assert set(times) == {"sgd", "plain", "refresh", "invert", "average"}
    assert result["multiple_of_sgd"]["sgd"] == 1
    assert times["refresh"] > times["plain"]
    assert set(parts) == {"capture", "factors", "inverses", "preconditioning", "rest"}
    # a part that is not there was not timed: the functions have moved
    assert min(parts["factors"], parts["inverses"], parts["preconditioning"]) > 0
    module.main([*options.split()])
    assert "vgg11, width 0.05, batch 4, cpu" in capsys.readouterr().out
