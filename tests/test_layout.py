import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "decaylab"
# A package imports only from packages to its left (and from itself).
ORDER = [
    {"errors"},
    {"document", "notebook", "text_table"},
    {"records", "data"},
    {"networks"},
    {"curvature"},
    {"optim"},
    {"probes"},
    {"training"},
    {"sweeps"},
    {"theory", "audits", "paper", "diagnosis", "attribution"},
    {"report", "integrations"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {path.relative_to(SOURCE).with_suffix("").as_posix() for path in FILES}


def package(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(path):
    """The packages of decaylab that a file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path} line {node.lineno}: write absolute imports")
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("decaylab.")}
    return {name for name in found if (SOURCE / name).is_dir() or f"{name}" in MODULES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_imports_point_to_the_left(path):
    own = package(path)
    if own == "__init__":
        return  # the public names
    assert own in RANK, f"{own} has no place in the order of packages"
    allowed = {name for name, rank in RANK.items() if rank < RANK[own]} | {own}
    assert imported(path) <= allowed


def test_the_check_sees_imports():
    assert {"errors", "records"} <= imported(SOURCE / "training" / "journal.py")
    assert "networks" in imported(SOURCE / "training" / "build.py")  # from decaylab import networks


def test_the_core_imports_nothing_optional_at_import_time():
    optional = {"pyarrow", "PIL", "matplotlib", "jinja2", "optuna", "torchvision", "ray"}
    optional |= {"lightning", "pytorch_lightning", "transformers", "accelerate"}
    optional |= {"tensorboard", "wandb", "mlflow", "pandas", "IPython"}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            else:
                continue
            assert not names & optional, f"{path} imports {names & optional} at its top"


def test_names_say_what_is_inside():
    for path in FILES:
        assert path.stem not in {"utils", "util", "helpers", "common", "misc"}, path


def test_no_pickle():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "import pickle" not in text, path
        assert "torch.load(" not in text, path
        assert "torch.save(" not in text, path
