"""What importing a part of decaylab brings along, and that no part needs itself."""

import ast
import subprocess
import sys
from pathlib import Path

import decaylab

SOURCE = Path(__file__).parents[1] / "src" / "decaylab"


def module_name(path: Path) -> str:
    parts = ("decaylab", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCE.rglob("*.py")}


def needed(name: str) -> set[str]:
    """The modules that run before this one has: what it imports at its top, and their packages."""
    found: set[str] = set()
    for node in top_level(ast.parse(MODULES[name].read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= inside or {node.module}
            names = {alias.name for alias in node.names}
            if node.module == "decaylab":  # through the package's lazy names
                homes = {f"decaylab.{decaylab._HOMES[n]}" for n in names & decaylab._HOMES.keys()}
                found = (found - {"decaylab"}) | homes
    return {module for module in found if module in MODULES} - {name}


def top_level(body):
    """Statements that run at import: not in functions, not for type checkers alone."""
    for node in body:
        if isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from top_level(node.body)
            yield from top_level(node.orelse)
        elif isinstance(node, ast.Try | ast.With):
            yield from top_level(node.body)
        else:
            yield node


def cycle(graph: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return []

    for name in sorted(graph):
        if found := visit(name, []):
            return found
    return []


def test_the_import_graph_has_no_cycle():
    graph = {name: needed(name) for name in MODULES}
    assert len(graph) > 100
    assert "decaylab.optim.kfac" in graph["decaylab.probes.registry"]
    # a package's own `__init__` gathers its modules, which come after it in none of them
    graph = {
        name: {other for other in others if not name.startswith(f"{other}.")}
        for name, others in graph.items()
    }
    assert cycle(graph) == []


def test_a_cycle_would_be_seen():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*[m for m in sys.modules if m.startswith('decaylab')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[1] for name in done.stdout.split() if "." in name}


def test_kfac_comes_without_the_trainer():
    above = {"training", "data", "diagnosis", "attribution", "audits", "paper", "sweeps", "report"}
    assert not loaded_by("from decaylab import KFAC") & (above | {"probes", "cli"})
    assert not loaded_by("from decaylab import watch") & above


def test_every_public_name_is_there():
    for name in decaylab.__all__:
        assert getattr(decaylab, name) is not None
        assert name in dir(decaylab)
    assert {*decaylab._HOMES, "DecaylabError", "__version__"} == {*decaylab.__all__}
