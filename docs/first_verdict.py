"""README's printed verdict and its figure, made by running README's own code on digits.

`make results-pages` writes them again.
"""

import contextlib
import io
import os
import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "verdict.png"
PRINTED = re.compile(r"(<!-- printed: verdict -->\n)(.*?)(<!-- end -->)", re.DOTALL)
STEPS = 600


def snippet(name: str) -> str:
    """A block of Python in README, by the name before it."""
    block = rf"<!-- run: {name} -->\n```python\n(.*?)^```"
    (text,) = re.findall(block, README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return text


def ran(folder: Path, steps: int = STEPS) -> tuple[str, str, Any]:
    """What README's loop prints, what its comparison prints, and the comparison, run in `folder`.

    Columns are 80, whatever the terminal has.
    """
    example = runpy.run_path(str(ROOT / "examples" / "first_verdict.py"))
    train_x, train_y, test_x, test_y = example["digits"]()
    names: dict[str, Any] = {}
    with contextlib.chdir(folder), _columns(80):
        for weight_decay, name in ((0.0, "plain"), (0.5, "decayed")):
            model = example["build"]()
            code = snippet("adamw").replace("weight_decay=0.5", f"weight_decay={weight_decay}")
            code = code.replace("records/decayed", f"records/{name}")
            loader = example["batches"](train_x, train_y, steps)
            names = {"model": model, "loader": loader, "inputs": test_x[:64]}
            with contextlib.redirect_stdout(io.StringIO()) as alone:
                exec(code, names)
            names["watched"].log(test_accuracy=example["accuracy"](model, test_x, test_y))
            names["watched"].detach()
        with contextlib.redirect_stdout(io.StringIO()) as compared:
            exec(snippet("verdict"), names)
    return alone.getvalue(), compared.getvalue(), names["diagnosis"]


@contextlib.contextmanager
def _columns(number: int) -> Any:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def printed() -> str:
    """The verdict that README shows."""
    block = PRINTED.search(README.read_text(encoding="utf-8"))
    assert block is not None
    return "\n".join(re.findall(r"```\n(.*?)```", block[2], re.DOTALL))


def folded(text: str) -> str:
    """The verdict as README shows it: the layers, and what follows from them, open on a click."""
    first, layers, rest = text.partition("\nHow far each layer turns\n")
    summary = "<details><summary>How far each layer turns, and what follows</summary>"
    return f"```\n{first}```\n\n{summary}\n\n```{layers}{rest}```\n\n</details>\n"


def main() -> None:
    """Write the verdict into README, and its figure."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        _, text, diagnosis = ran(Path(folder))
        diagnosis.plot().savefig(PICTURE, dpi=90)
    page = README.read_text(encoding="utf-8")
    README.write_text(PRINTED.sub(lambda m: m[1] + folded(text) + m[3], page))


if __name__ == "__main__":
    main()
