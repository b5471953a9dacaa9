"""SQL in a kernel of Jupyter without the package that draws progress bars there."""

import os
import sys
from pathlib import Path

import pytest

_SETUP = """
import sys
sys.modules["ipywidgets"] = None
from pathlib import Path
from lightning_rlprof import load
from lightning_rlprof.store.run_store import Store
from tests.builders.runs import grpo_run
made = grpo_run(Path("run"), steps=2)
"""


@pytest.mark.deep
def test_sql_in_a_kernel_without_ipywidgets_answers_and_prints_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbclient
    from nbformat.v4 import new_code_cell, new_notebook

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    cells = [
        _SETUP,
        'load("run").sql("select count(*) as n, max(hash(range)) as h from range(600000000)")',
        'Store("run", load).sql("select count(*) as n from spans")',
    ]
    notebook = new_notebook(cells=[*map(new_code_cell, cells)])
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=place).execute()
    shown = [[each["output_type"] for each in cell.outputs] for cell in notebook.cells]
    assert shown == [[], ["execute_result"], ["execute_result"]]
