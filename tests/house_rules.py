"""The rules of the house, each a function from one file to what is wrong with it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 30

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_ROOMS = {path.stem for path in Path(__file__).parents[1].glob("lightning_rlprof/*")}
_VAGUE = {"common", "constants", "helper", "helpers", "manager", "misc", "util", "utils"}
_MACHINE_PATH = re.compile(r"(?<![\w.])/(home|opt|root|Users|work|tmp/\w)/\w")


def long_files(path: Path) -> list[str]:
    """A file has up to 300 lines."""
    lines = len(path.read_text().splitlines())
    return [f"{path}: {lines} lines"] if lines > MAX_FILE_LINES else []


def long_functions(path: Path) -> list[str]:
    """A function has up to 30 lines, signature, docstring and nested functions included."""
    found = []
    for node in _nodes(path):
        if isinstance(node, _FUNCTIONS) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno} {node.name}: {lines} lines")
    return found


def incomplete_all(path: Path) -> list[str]:
    """``__all__`` names every public class, function and constant that a module defines."""
    tree = ast.parse(path.read_text())
    declared, public = None, []
    for node in tree.body:
        for name in _names_bound(node):
            if name == "__all__" and isinstance(node, ast.Assign):
                declared = ast.literal_eval(node.value)
            elif not name.startswith("_") and not _is_plumbing(node):
                public.append(name)
    if declared is None:
        return [f"{path}: has no __all__ and defines {public}"] if public else []
    return [f"{path}: {name} is not in __all__" for name in public if name not in declared]


def undocumented(path: Path) -> list[str]:
    """Every module, public class, public function and public method has a docstring."""
    tree = ast.parse(path.read_text())
    found = [] if ast.get_docstring(tree) else [f"{path}: has no docstring"]
    queue: list[ast.AST] = [tree]
    while queue:
        for node in ast.iter_child_nodes(queue.pop()):
            if isinstance(node, _DEFINITIONS) and _needs_docstring(node):
                if not ast.get_docstring(node):
                    found.append(f"{path}:{node.lineno} {node.name} has no docstring")
                if isinstance(node, ast.ClassDef):
                    queue.append(node)
    return found


def untold_constants(path: Path) -> list[str]:
    """A public constant is followed by a text that says what it is."""
    body = ast.parse(path.read_text()).body
    return [
        f"{path}:{node.lineno} {names[0]} has no docstring"
        for node, after in zip(body, [*body[1:], ast.Pass()], strict=True)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and (names := [name for name in _names_bound(node) if not name.startswith("_")])
        and not _is_plumbing(node)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]


def prints(path: Path) -> list[str]:
    """Nothing is printed; people are spoken to by the command line and by logging."""
    return [
        f"{path}:{node.lineno} prints"
        for node in _nodes(path)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]


def relative_imports(path: Path) -> list[str]:
    """Imports are absolute."""
    return [
        f"{path}:{node.lineno} imports relatively"
        for node in _nodes(path)
        if isinstance(node, ast.ImportFrom) and node.level
    ]


def root_imports(path: Path) -> list[str]:
    """Inside the package nobody imports its root, whose names are there for users."""
    return [
        f"{path}:{node.lineno} imports {alias.name} from the package root"
        for node in _nodes(path)
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and node.module == "lightning_rlprof")
        for alias in node.names
        if alias.name == "lightning_rlprof"
        or (isinstance(node, ast.ImportFrom) and alias.name not in _ROOMS)
    ]


def vague_names(path: Path) -> list[str]:
    """A room is named by its subject."""
    return [f"{path}: names no subject"] if _VAGUE & {path.stem, path.parent.name} else []


def machine_paths(path: Path) -> list[str]:
    """No file depends on where things lie on somebody's machine."""
    return [
        f"{path}:{number} names a machine's path"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _MACHINE_PATH.search(line)
    ]


def _nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def _names_bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, _DEFINITIONS):
        yield node.name
    elif isinstance(node, ast.Assign):
        targets = [each for at in node.targets for each in getattr(at, "elts", [at])]
        yield from (target.id for target in targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _is_plumbing(node: ast.stmt) -> bool:
    """Tell loggers, type variables and type aliases, which serve the module that makes them."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
        return True
    made_by = getattr(getattr(node, "value", None), "func", None)
    return made_by is not None and ast.unparse(made_by) in {
        "ParamSpec",
        "TypeVar",
        "logging.getLogger",
    }


def _needs_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    decorators = [ast.unparse(item) for item in node.decorator_list]
    # An overload is told by its implementation, a setter by its getter.
    told_elsewhere = any(d == "overload" or d.endswith(".setter") for d in decorators)
    return not node.name.startswith("_") and not told_elsewhere
