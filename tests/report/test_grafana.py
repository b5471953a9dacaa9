"""The Grafana dashboard in examples/grafana asks only for metrics that are exported."""

import json
import re
import shutil
import subprocess
from itertools import combinations, product
from typing import Any

import pytest
import yaml

from lightning_rlprof.report.live_view import GAUGES
from tests.places import ROOT
from tests.report.test_live_view_metrics import full, text

FOLDER = ROOT / "examples" / "grafana"
DASHBOARD = json.loads((FOLDER / "rlprof.json").read_text())
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
EXPRESSIONS = [target["expr"] for target in TARGETS]
VARIABLES = [each["query"] for each in DASHBOARD["templating"]["list"]]


def exported(content: str) -> dict[str, set[str]]:
    """Return the labels of each metric, by name."""
    found: dict[str, set[str]] = {}
    for line in content.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.partition(" ")[0].partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *VARIABLES[1:]])
def test_every_metric_of_an_expression_is_exported_with_its_labels(expression, tmp_path):
    known = exported(text(full(tmp_path)))
    names = set(re.findall(r"rlprof_\w+", expression))
    assert names
    assert names <= known.keys()
    groups = set(re.findall(r"by \((\w+)\)", expression))
    assert all(groups <= known[name] for name in names)


def test_every_legend_names_a_label_that_is_left(tmp_path):
    known = exported(text(full(tmp_path)))
    for target in TARGETS:
        (first, *_) = re.findall(r"rlprof_\w+", target["expr"])
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known[first]


def test_every_metric_is_on_the_dashboard():
    shown = set(re.findall(r"rlprof_\w+", " ".join([*EXPRESSIONS, *VARIABLES])))
    assert shown == set(GAUGES)


def test_panels_have_numbers_of_their_own_and_do_not_overlap():
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [
        set(
            product(
                range(at["x"], at["x"] + at["w"]),
                range(at["y"], at["y"] + at["h"]),
            )
        )
        for at in (panel["gridPos"] for panel in panels)
    ]
    assert all(not one & other for one, other in combinations(places, 2))
    assert all(x < 24 for place in places for x, _ in place)


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("NO PROMTOOL: install prometheus; its own checks were not run")
    return found


@pytest.mark.deep
def test_promtool_accepts_the_metrics(tmp_path):
    command = [promtool(), "check", "metrics"]
    content = text(full(tmp_path))
    done = subprocess.run(command, input=content, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.deep
def test_promtool_accepts_every_expression_and_the_configuration(tmp_path):
    rules = [
        {"record": f"panel:{at}", "expr": expression.replace("$instance", ".*")}
        for at, expression in enumerate(EXPRESSIONS)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    config = shutil.copy(FOLDER / "prometheus.yml", tmp_path)
    (tmp_path / "scraper-token").write_text("secret")
    for command in (
        [promtool(), "check", "rules", str(path)],
        [promtool(), "check", "config", config],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
