"""slime's dumps of rollouts: doubles of ``Sample.to_dict`` and of the events of its trace."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.samples.long_tail import long_tail, tail_causes
from lightning_rlprof.analysis.samples.sample_tables import sample_path, samples
from lightning_rlprof.errors import TraceError
from lightning_rlprof.run import Run, load
from tests.loaders.framework_records import ZERO, Part, plain, sample
from tests.places import ROOT

MS = 1_000_000


def dump(path: Path, own: Sequence[Mapping[str, object]], rollout: int = 0) -> Path:
    """Write samples as JSON; slime writes the same in a pickle."""
    path.write_text(json.dumps({"rollout_id": rollout, "samples": [*own]}))
    return path


def fates(run: Run) -> dict[object, object]:
    table = samples(run)
    return dict(zip(table.column("fate"), table.column("samples"), strict=True))


def test_the_phases_of_a_sample_are_its_innermost_generations_and_its_reward(
    tmp_path: Path,
) -> None:
    own = sample(3, plain(0, 2, 50), length=50)
    run = load(dump(tmp_path / "rollout_0.json", [own]))
    assert [
        (span.name, span.kind, span.step, span.start_ns // MS, span.end_ns // MS) for span in run
    ] == [
        ("actor_generate", "region", 1, 0, 1750),
        ("actor_generate", "stage", 1, 0, 2250),
        ("step", "step", 1, 0, 2250),
        ("compute_reward", "region", 1, 1750, 2250),
        ("sample unknown", "mark", 1, 2250, 2250),
    ]
    generate, *_, fate = run
    number = int((generate.counters or {})["sample"])
    assert 0 <= number < 2**52
    assert generate.counters == {"sample": number, "tokens": 50, "version": 3}
    assert fate.counters == {"sample": number, "tokens": 50, "reward": 1.0}
    assert run.table("sample_names").rows == [(0, number, "1", "1", 0)]
    assert run.headers[0].role == "rollout"
    assert run.unix_ns == pytest.approx((ZERO + 0.25) * 1e9, abs=256)
    assert fates(run) == {"generated": 1, "unknown": 1, "trained": 0}
    assert [row[0] for row in sample_path(run).rows] == [
        *("actor_generate", "compute_reward", "sample unknown")
    ]
    assert not run.warnings


def test_json_of_the_same_samples_is_read_the_same(tmp_path: Path) -> None:
    own = [sample(index, plain(index, index + 2, 9), length=9) for index in range(3)]
    wanted = [*load(dump(tmp_path / "rollout_4.json", own, 4))]
    whole, lines = tmp_path / "r.json", tmp_path / "rollout_4.jsonl"
    whole.write_text(json.dumps({"rollout_id": 4, "samples": own}, indent=1))
    lines.write_text("".join(json.dumps(each) + "\n" for each in own))
    assert [*load(whole)] == [*load(lines)] == wanted
    assert wanted[0].step == 5


@pytest.mark.parametrize(
    ("versions", "first", "last"),
    [
        (["4", "5"], {"version": 4}, {"version": 5}),
        (["4"], {"version": 4}, {"version_end": 4}),
        (["4", "5", "6"], {"version": 4}, {"version_end": 6}),
        (["default"], {}, {}),
        ([], {}, {}),
        (None, {}, {}),
    ],
)
def test_weights_of_a_partial_rollout(
    versions: object, first: dict[str, int], last: dict[str, int], tmp_path: Path
) -> None:
    parts: list[Part] = [
        ("sglang_generate", 0, 1, None, {"completion_tokens": 10}),
        ("my_tool", 1, 2, None, {}),
        ("sglang_generate", 2, 3, None, {"completion_tokens": 20}),
    ]
    own = sample(1, parts, length=35, weight_versions=versions)
    run = load(dump(tmp_path / "rollout_0.json", [own]))
    told = [dict(span.counters or {}) for span in run if span.name == "actor_generate"]
    told = [each for each in told if each]
    number = told[0]["sample"]
    assert told == [
        {"sample": number, "tokens": 10, **first},
        {"sample": number, "tokens": 20, **last},
    ]


def test_without_counts_of_the_server_the_response_length_is_the_tokens(tmp_path: Path) -> None:
    parts: list[Part] = [("sglang_generate", 0, 1, None, {}), ("sglang_generate", 1, 2, None, {})]
    run = load(dump(tmp_path / "rollout_0.json", [sample(1, parts, length=35)]))
    assert samples(run).rows[0][3] == 35


def test_a_custom_generation_without_spans_is_the_whole(tmp_path: Path) -> None:
    parts: list[Part] = [
        ("generate_and_rm_group", 0, 3, None, {}),
        ("generate_and_rm", 0, 2, "generate_and_rm_group/0", {}),
        ("reward_model", 1, 2, "generate_and_rm/1", {}),
    ]
    run = load(dump(tmp_path / "rollout_0.json", [sample(1, parts, length=7)]))
    assert [(span.name, span.parent) for span in run if span.kind == "region"] == [
        ("actor_generate", None),
        ("compute_reward", 1),
    ]
    # A sample that waited and was aborted generated nothing.
    silent = sample(2, parts[:2], status="aborted")
    other = sample(3, plain(0, 1, 5), length=5)
    run = load(dump(tmp_path / "rollout_1.json", [silent, other], 1))
    assert [span.name for span in run if span.kind == "region"] == [
        *("actor_generate", "compute_reward")
    ]
    assert fates(run) == {"generated": 2, "aborted": 1, "unknown": 1, "trained": 0}


def test_what_is_around_a_generation_is_no_phase_and_what_is_in_it_is_a_part(
    tmp_path: Path,
) -> None:
    parts: list[Part] = [
        ("my_turn", 0, 4, None, {}),
        ("sglang_generate", 0.5, 2, "my_turn/0", {"completion_tokens": 10}),
        ("my_request", 1, 2, "sglang_generate/1", {}),
        ("my_tool", 2, 3, "my_turn/0", {}),
    ]
    run = load(dump(tmp_path / "rollout_0.json", [sample(1, parts, length=10)]))
    assert [(span.name, span.parent) for span in run if span.kind == "region"] == [
        ("actor_generate", None),
        ("my_request", 1),
        ("my_tool", None),
    ]


def test_fates_are_those_that_slime_knows(tmp_path: Path) -> None:
    own = [
        sample(0, plain(0, 1, 1)),
        sample(1, plain(0, 1, 1), status="truncated"),
        sample(2, plain(0, 1, 1), status="aborted"),
        sample(3, plain(0, 1, 1), status="failed"),
        sample(4, plain(0, 1, 1), remove_sample=True),
        sample(5, plain(0, 1, 1), reward={"score": 1.0}),
    ]
    dump(tmp_path / "rollout_0.json", own)
    later = [sample(6, plain(9, 11, 1)), sample(7, plain(9, 10, 1), status="truncated")]
    dump(tmp_path / "rollout_eval_0.json", later)
    run = load(tmp_path)
    stages = [(each.name, each.start_ns // MS) for each in run if each.kind == "stage"]
    assert stages == [("actor_generate", 0), ("evaluation", 9000)]
    assert fates(run) == {
        "generated": 8, "evaluation": 2, "aborted": 2, "filtered": 1, "truncated": 1,
        "unknown": 2, "trained": 0,
    }  # fmt: skip


def test_a_folder_of_rollouts_is_one_run_whose_steps_are_rollouts(tmp_path: Path) -> None:
    # Sample 9 begins in rollout 0, is aborted there, and ends in rollout 1.
    resumed: list[Part] = [
        ("sglang_generate", 3, 4, None, {"completion_tokens": 5}),
        ("sglang_generate", 10.5, 12, None, {"completion_tokens": 6}),
    ]
    dump(tmp_path / "rollout_0.json", [sample(n, plain(0, 3, 9), length=9) for n in range(4)], 0)
    second = [sample(n, plain(10, 14, 9), length=9) for n in range(4, 7)]
    dump(tmp_path / "rollout_1.json", [*second, sample(9, resumed, length=11)], 1)
    run = load(tmp_path)
    steps = [
        (span.step, span.start_ns // MS, span.end_ns // MS) for span in run if span.kind == "step"
    ]
    assert steps == [(1, 0, 10000), (2, 10000, 14250)]
    stages = [(each.start_ns // MS, each.end_ns // MS) for each in run if each.kind == "stage"]
    assert stages == [(0, 3750), (10000, 14250)]
    nine = [span for span in run if (span.counters or {}).get("tokens") in (5, 6)]
    assert [span.step for span in nine] == [1, 2]
    assert samples(run).rows[0][1:4:2] == (8, 7 * 9 + 11)


def test_the_long_tail_of_a_rollout(tmp_path: Path) -> None:
    own = [sample(at, plain(0, 1.25, 100), group=at, length=100) for at in range(9)]
    own.append(sample(9, plain(0, 10.25, 1000), length=1000, reward=0.0))
    run = load(dump(tmp_path / "rollout_0.json", own))
    row = long_tail(run).rows[2]
    assert (row[0], row[1], row[5]) == (0.9, 9_000 * MS, 1)
    assert row[3] == pytest.approx(8_100 * MS)  # nine of ten slots
    assert row[6:] == (1000 / 1900, 1000 / 190)
    assert tail_causes(run).rows[0][0] == "long responses"


def test_the_documented_conversion_makes_such_a_dump_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    own = [sample(1, plain(0, 1, 8), length=8, metadata={"own": np.zeros(3)})]
    own[0]["reward"] = np.float64(0.5)
    path = tmp_path / "dumps" / "rollout_0.pt"
    path.parent.mkdir()
    torch.save({"rollout_id": 0, "samples": own}, path)
    page = (ROOT / "docs" / "integrations" / "frameworks.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(page.split("```python\n")[1].split("```")[0], {})
    run = load(path.with_suffix(".jsonl"))
    assert samples(run).rows[0][1:4:2] == (1, 8)
    assert [dict(span.counters or {})["reward"] for span in run if span.kind == "mark"] == [0.5]


def test_samples_that_come_from_one_rollout_share_their_spans(tmp_path: Path) -> None:
    one = sample(1, plain(0, 1, 8), length=8)
    run = load(dump(tmp_path / "rollout_0.json", [one, one | {"index": 2}]))
    assert samples(run).rows[0][1:4:2] == (1, 8)


def test_samples_without_a_trace_are_counted(tmp_path: Path) -> None:
    own = [sample(1, plain(0, 1, 8)), sample(2, [], length=5) | {"trace": None}]
    run = load(dump(tmp_path / "rollout_0.json", own))
    assert samples(run).rows[0][1:4:2] == (2, 13)
    with pytest.raises(TraceError, match="its samples have no trace"):
        load(dump(tmp_path / "rollout_1.json", own[1:]))
