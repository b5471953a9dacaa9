"""Metrics for Prometheus: names, labels, values, and what the official parser makes of them."""

from pathlib import Path

import pytest

from lightning_rlprof.loaders.live_run import RECENT
from lightning_rlprof.report.live_view import GAUGES, Gauge, Sample, exposition, gauges
from tests.report.test_live_view import H100, MS, Job

WEIRD = 'a"b\\c\nd\ud800é\\n'


def text(job: Job) -> str:
    view = job.view
    return exposition(gauges(job.live, view))


def full(run: Path) -> Job:
    """Return a job of which everything is known."""
    job = Job(run, 2, ("actor", "critic"), **H100)
    counters = {"host_rss_bytes": 10, "children_rss_bytes": 5, "device_reserved_bytes": 3}
    counters |= {"tokens": 300, "flops": 6e12}
    job.step(1, counters=counters)
    job.step(2, slow={1: 50}, counters=counters)
    values = {"device_power_watts": 300, "odd name!": 1}
    job.writers[0].write([("metrics", 0, 1, 0, {}, values), ("note", 1, "warning", "disk")])
    return job


def parsed(content: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    parser = pytest.importorskip("prometheus_client.parser", reason="pip install prometheus-client")
    found = {}
    for family in parser.text_string_to_metric_families(content):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def test_every_metric_is_exported_with_its_meaning(tmp_path):
    lines = text(full(tmp_path)).splitlines()
    assert [line.split()[2] for line in lines if line.startswith("# HELP")] == [
        *GAUGES,
        "rlprof_background_device_power_watts",
        "rlprof_background_odd_name_",
    ]
    assert sum(line.startswith("# TYPE") for line in lines) == len(GAUGES) + 2


def test_the_official_parser_reads_the_values(tmp_path):
    job = full(tmp_path)
    found = parsed(text(job))

    def value(name, **labels):
        return found[f"rlprof_{name}", frozenset(labels.items())]

    second = {"rank": "1", "role": "critic"}
    assert value("step", **second) == 2
    assert value("step_duration_seconds", **second) == pytest.approx(0.15)
    assert value("step_duration_median_seconds", **second) == pytest.approx(0.125)
    assert value("stage_duration_seconds", **second, stage="actor_update") == pytest.approx(0.03)
    rate = 600 / (0.06 + 0.11)
    generate = {"stage": "actor_generate"}
    assert value("stage_tokens_per_second", **second, **generate) == pytest.approx(rate)
    assert 0 < value("stage_mfu_ratio", **generate) < 0.2
    assert value("resident_memory_bytes", **second) == 15
    assert value("device_memory_bytes", **second) == 3
    assert value("quiet_seconds", **second) == 0
    assert value("background_device_power_watts", rank="0", role="actor") == 300
    assert (value("ranks"), value("world_size_ranks"), value("ended_ranks")) == (2, 2, 0)
    assert (value("alarms", level="warning"), value("alarms", level="error")) == (1, 0)
    assert value("run_info", run=tmp_path.name, device=H100["device_name"]) == 1


def test_what_is_not_known_is_absent(tmp_path):
    job = Job(tmp_path, 1)
    content = text(job)
    assert "duration" not in content
    assert "memory" not in content
    job.writers[0].write([("end", 9, "finished")])
    assert "rlprof_quiet_seconds" not in text(job)
    assert "rlprof_ended_ranks 1\n" in text(job)


def test_stages_have_the_means_of_the_last_steps(tmp_path):
    """The page shows 200 steps, by which a change would be seen too late in a dashboard."""
    job = Job(tmp_path, 1)
    for step in range(1, RECENT + 31):
        job.step(step, slow={0: 100 if step <= 30 else 0})
    labels = frozenset({"rank": "0", "role": "actor", "stage": "actor_generate"}.items())
    assert parsed(text(job))["rlprof_stage_duration_seconds", labels] == pytest.approx(0.06)
    assert job.view.found.mean_ns > 130 * MS


def test_labels_of_any_text_stay_labels():
    sample = Sample("rlprof_stage_duration_seconds", {"stage": WEIRD}, 1.0)
    found = parsed(exposition([Gauge(sample.name, "of a stage", [sample])]))
    names = [dict(labels).get("stage") for name, labels in found if "stage" in name]
    assert names == [WEIRD.replace("\ud800", "?")]
