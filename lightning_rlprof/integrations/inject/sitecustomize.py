"""Opens rlprof's doors in every Python that a program under ``rlprof run`` starts.

Python imports this by its name, because `rlprof run` puts its folder in front of PYTHONPATH. It
then runs the ``sitecustomize`` that it hides, if there is one.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_here = os.path.dirname(os.path.abspath(__file__))


def _run_hidden() -> None:
    others = [path for path in sys.path if os.path.abspath(path or ".") != _here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _open_doors() -> None:
    try:
        from lightning_rlprof.integrations.doors.registry import open_doors
    except ImportError:  # A virtual environment may lack rlprof.
        _sign("without")
        return
    _sign("with")
    open_doors()


def _sign(kind: str) -> None:
    """Tell `rlprof run` that this interpreter has heard of it, with rlprof or without."""
    folder = os.environ.get("RLPROF_SIGNS")
    try:
        if folder:
            with open(os.path.join(folder, f"{kind}-{os.getpid()}"), "w", encoding="utf-8") as file:
                file.write(sys.executable)
    except OSError:  # The folder is on another host, or the command has ended.
        pass


try:
    _run_hidden()
finally:
    _open_doors()
