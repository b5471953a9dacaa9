"""The package's import graph from its sources: lazy imports count, type-checking ones do not."""

import ast
from collections.abc import Iterator
from pathlib import Path

Graph = dict[str, set[str]]


def modules_in(package: Path) -> dict[str, Path]:
    """Return the file of every module of a package by dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_graph(package: Path) -> Graph:
    """Return what each module imports from its own package, inside functions too."""
    modules = modules_in(package)
    return {
        name: {target for target in _targets(path, modules) if target != name}
        for name, path in modules.items()
    }


def find_cycle(graph: Graph) -> list[str]:
    """Return the modules of one circle, the first repeated last; empty when there is none."""
    done: set[str] = set()
    for start in sorted(graph):
        circle = _walk(graph, start, [], done)
        if circle:
            return circle
    return []


def _walk(graph: Graph, name: str, path: list[str], done: set[str]) -> list[str]:
    if name in path:
        return [*path[path.index(name) :], name]
    if name in done:
        return []
    for target in sorted(graph[name]):
        circle = _walk(graph, target, [*path, name], done)
        if circle:
            return circle
    done.add(name)
    return []


def _targets(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    for node in _running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield from [name for name in (whole, node.module) if name in modules][:1]
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (
                item.value
                for item in node.args
                if isinstance(item, ast.Constant) and item.value in modules
            )


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield other
                yield from _running(other)
            continue
        yield node
        yield from _running(node)
