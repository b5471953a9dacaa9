"""Read training code without importing it, and propose a stage for each method that means one."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.records.stage_aliases import stage_of_method

_MOST_FILES = 200
_DEEPEST = 4  # parts of parts
_PROPERTIES = {"property", "cached_property", "setter", "getter", "deleter"}
_LIGHTNING = {"trainer", "logger", "loggers", "fabric"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Proposed:
    """A stage for one target of a ``wrap`` rule.

    Attributes:
        stage: Which.
        where: What says so: a file and line.
        sure: Whether the code shows that the target is a method, not an object that is called.
    """

    stage: str
    where: str
    sure: bool = True


@dataclass
class ModuleCode:
    """What the code of one LightningModule says.

    Attributes:
        name: Of the class.
        file: Where it is defined.
        targets: What to wrap, by dotted name.
        marked: Stages that the code marks with ``stage()``, which need no rule.
    """

    name: str
    file: Path
    targets: dict[str, Proposed] = field(default_factory=dict)
    marked: set[str] = field(default_factory=set)


@dataclass
class _Class:
    node: ast.ClassDef
    file: Path
    marks: bool  # whether its file imports rlprof


def lightning_modules(script: Path) -> list[ModuleCode]:
    """Return the LightningModules of a file and of the files beside it that it imports.

    Nothing is imported or run. Targets are methods of the module and its parts whose name means a
    stage, and calls of such methods on parts whose class is not found.

    Raises:
        ConfigError: The file cannot be read, or is not valid Python.
    """
    classes: dict[str, _Class] = {}
    for path, tree in _files(script):
        marks = "lightning_rlprof" in {name.partition(".")[0] for name, _ in _imports(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, _Class(node, path, marks))
    return [
        _Reader(classes).read(name)
        for name in classes
        if "LightningModule" in {base for each in _line(classes, name) for base in _bases(each)}
    ]


def _files(script: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Yield a script, and what it imports from beside it, each parsed."""
    left, seen = [script], {script.resolve()}
    while left:
        path = left.pop(0)
        try:
            tree = ast.parse(path.read_bytes())
        except OSError as error:
            _refuse(path, script, f"cannot be read: {error.strerror}")
            continue
        except SyntaxError as error:
            _refuse(path, script, f"line {error.lineno}, is not valid Python: {error.msg}")
            continue
        except (ValueError, RecursionError) as error:
            _refuse(path, script, f"is not valid Python: {error}")
            continue
        yield path, tree
        for name, level in _imports(tree):
            for found in _places(name, level, path, script):
                if found.resolve() not in seen and len(seen) < _MOST_FILES:
                    seen.add(found.resolve())
                    left.append(found)


def _refuse(path: Path, script: Path, text: str) -> None:
    if path == script:  # others are named by an import that may never run
        raise ConfigError(f"{path}{',' if text.startswith('line') else ''} {text}")


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield dotted names that may be modules, and how many dots stood before each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.name, 0) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            yield from ((f"{base}{each.name}", node.level) for each in node.names)
            if node.module:
                yield node.module, node.level


def _places(name: str, level: int, path: Path, script: Path) -> Iterator[Path]:
    """Yield the files that a dotted name stands for, beside the importing file or the script."""
    roots = [path.parent, script.parent, Path()]
    if level:
        roots = [path.resolve().parents[min(level, len(path.resolve().parents)) - 1]]
    for root in roots:
        stem = root.joinpath(*name.split("."))
        for file in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            if file.is_file():
                yield file


def find_script(word: str) -> Path:
    """Return the file of a path or of a dotted module name, looked for in this directory.

    Raises:
        ConfigError: There is none.
    """
    if Path(word).is_file():
        return Path(word)
    dotted = all(part.isidentifier() for part in word.split("."))
    found = [*_places(word, 0, Path("x"), Path("x"))] if dotted else []
    if not found:
        raise ConfigError(f"{word} is neither a Python file nor a module below this directory")
    return found[0]


class _Reader:
    """Collect the targets of one LightningModule, part by part."""

    def __init__(self, classes: dict[str, _Class]) -> None:
        self._classes = classes
        self._inside: set[str] = set()  # called within a method that is a stage itself
        self._outside: set[str] = set()

    def read(self, name: str) -> ModuleCode:
        code = ModuleCode(name, self._classes[name].file)
        self._visit(code, name, "", ())
        for target in [*code.targets]:
            within = target in self._inside - self._outside
            if within or code.targets[target].stage in code.marked:
                del code.targets[target]
        return code

    def _visit(self, code: ModuleCode, name: str, path: str, around: tuple[str, ...]) -> None:
        functions = self._functions(name)
        parts: dict[str, str] = {}
        for _, _, function in functions:
            parts |= self._parts(function)
        for file, marks, function in functions:
            code.marked |= _marked(function) if marks else set()
            stage = None if _is_property(function) else stage_of_method(function.name)
            if stage:
                where = f"{file}:{function.lineno}"
                code.targets[path + function.name] = Proposed(stage, where)
            for chain, line in _calls(function):
                target = path + ".".join(chain)
                called = stage_of_method(chain[-1])
                if kind := parts.get(chain[0]) if len(chain) == 1 else None:
                    target += ".forward"
                    called = called if self._has(kind, "forward") else None
                (self._inside if stage else self._outside).add(target)
                if called and not stage:
                    sure = kind is not None or _is_method(chain)
                    where = f"called in {file}:{line}"
                    code.targets.setdefault(target, Proposed(called, where, sure))
        for attribute, kind in parts.items():
            if kind not in around and len(around) < _DEEPEST:
                self._visit(code, kind, f"{path}{attribute}.", (*around, name))

    def _functions(self, name: str) -> list[tuple[str, bool, Function]]:
        """Return the methods of a class and its bases, with their file, nearest class last."""
        return [
            (each.file.name, each.marks, function)
            for each in reversed(_line(self._classes, name))
            for function in each.node.body
            if isinstance(function, Function)
        ]

    def _has(self, name: str, method: str) -> bool:
        return any(function.name == method for _, _, function in self._functions(name))

    def _parts(self, function: Function) -> dict[str, str]:
        """Return attributes that a method sets on ``self`` to objects of a class that is known."""
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        typed = {each.arg: _last(each.annotation) for each in arguments}
        found = {}
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            value = node.value
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            kind = _last(node.annotation) if isinstance(node, ast.AnnAssign) else None
            made = _last(value.func) if isinstance(value, ast.Call) else None
            given = typed.get(value.id) if isinstance(value, ast.Name) else None
            for target in targets:
                chain = _chain(target)
                for each in (made, given, kind):
                    if len(chain) == 2 and chain[0] == _self(function) and each in self._classes:
                        found[chain[1]] = each
        return found


def _calls(function: Function) -> Iterator[tuple[list[str], int]]:
    """Yield what a method calls on ``self``, as parts of a dotted name, with the line."""
    for node in ast.walk(function):
        chain = _chain(node.func) if isinstance(node, ast.Call) else []
        if len(chain) > 1 and chain[0] == _self(function) and chain[1] not in _LIGHTNING:
            yield chain[1:], getattr(node, "lineno", 0)


def _is_method(chain: list[str]) -> bool:
    """Return whether a call of an unknown object looks like one of a method, not of a module."""
    name = chain[-1]
    return name.startswith(("generate", "compute_")) or (len(chain) > 1 and "_" in name)


def _line(classes: dict[str, _Class], name: str, seen: tuple[str, ...] = ()) -> list[_Class]:
    """Return a class and those of its bases that are known, nearest first."""
    if name not in classes or name in seen:
        return []
    line = [classes[name]]
    for base in _bases(classes[name]):
        line += _line(classes, base, (*seen, name))
    return line


def _bases(found: _Class) -> list[str]:
    return [name for base in found.node.bases if (name := _last(base))]


def _last(node: ast.AST | None) -> str | None:
    """Return the last part of a dotted name, also of one with arguments or in quotes."""
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.rpartition(".")[2]
    chain = _chain(node)
    return chain[-1] if chain else None


def _chain(node: ast.AST | None) -> list[str]:
    """Return the parts of ``a.b.c``; nothing if it begins with anything but a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def _self(function: Function) -> str | None:
    arguments = [*function.args.posonlyargs, *function.args.args]
    return arguments[0].arg if arguments else None


def _is_property(function: Function) -> bool:
    return any(_last(each) in _PROPERTIES for each in function.decorator_list)


def _marked(function: Function) -> set[str]:
    """Return the stages that a function marks with ``stage("name")``."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and node.args]
    first = [call.args[0] for call in calls if _last(call.func) == "stage"]
    return {str(each.value) for each in first if isinstance(each, ast.Constant)}
