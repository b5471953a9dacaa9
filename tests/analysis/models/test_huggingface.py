"""Reading a `config.json`: what it may be, what it may lack, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.models.architecture import LatentAttention
from lightning_rlprof.analysis.models.huggingface import KNOWN, read_model
from lightning_rlprof.errors import RlprofError
from tests.analysis.models.published import CONFIGS
from tests.analysis.models.tiny import MODELS
from tests.places import ROOT

LLAMA = MODELS["llama"]


class Config:
    """A configuration object: only `to_dict` is used."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def to_dict(self) -> dict[str, Any]:
        return self._values


def test_a_file_its_folder_its_content_and_an_object_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    models = [read_model(each) for each in (path, str(path), tmp_path, LLAMA, Config(LLAMA))]
    assert models == [models[0]] * 5


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.attention.window for layer in read_model(config).layers]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MODELS["mistral"], [8, 8, 8]),
        (MODELS["mistral"] | {"sliding_window": None}, [None] * 3),
        ({k: v for k, v in MODELS["mistral"].items() if k != "sliding_window"}, [4096] * 3),
        (MODELS["qwen2 sliding"], [None, 8, 8]),
        (MODELS["qwen2 sliding"] | {"use_sliding_window": False}, [None] * 3),
        (MODELS["gemma2"], [8, None, 8]),
        (MODELS["gemma3"], [8, 8, 8, 8, 8, None, 8]),
        (MODELS["gemma3"] | {"sliding_window_pattern": 3}, [8, 8, None, 8, 8, None, 8]),
        (MODELS["gpt_oss"], [8, None, 8, None]),
        (
            MODELS["gemma2"] | {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
            [None, None, 8],
        ),
    ],
)
def test_windows(config: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(config) == expected


def test_layers_without_experts() -> None:
    def dense(config: dict[str, Any]) -> list[bool]:
        return [type(layer.block).__name__ == "Mlp" for layer in read_model(config).layers]

    moe = MODELS["qwen3_moe"]
    assert dense(MODELS["deepseek_v3"]) == [True, False, False]
    assert dense(moe | {"decoder_sparse_step": 2}) == [True, False, True]
    assert dense(moe | {"mlp_only_layers": [2]}) == [False, False, True]


def test_old_files_of_qwen_vl_have_the_text_keys_outside() -> None:
    nested = MODELS["qwen2_5_vl"]
    old = {**nested["text_config"], **{k: v for k, v in nested.items() if k != "text_config"}}
    assert read_model(old) == read_model(nested)


def test_attention_without_a_query_rank() -> None:
    attention = read_model(MODELS["deepseek_v2"]).layers[0].attention
    assert isinstance(attention, LatentAttention)
    assert attention.query_rank is None


def test_an_unknown_type_names_the_known_ones() -> None:
    with pytest.raises(RlprofError, match="unknown model type 'mamba2'") as error:
        read_model({"model_type": "mamba2"})
    assert all(name in error.value.hint for name in KNOWN)


def test_a_known_text_part_of_an_unknown_type_is_offered() -> None:
    with pytest.raises(RlprofError, match="unknown model type 'gemma3'") as error:
        read_model({"model_type": "gemma3", "text_config": MODELS["gemma3"]})
    assert "pass the content of 'text_config'" in error.value.hint


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "model_type"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(RlprofError, match=f"no '{key}'"):
        read_model({name: value for name, value in LLAMA.items() if name != key})


def test_a_tower_without_its_configuration_is_named() -> None:
    with pytest.raises(RlprofError, match="no 'vision_config'"):
        read_model({**LLAMA, "model_type": "qwen2_vl"})


@pytest.mark.parametrize("value", ["64", 6.4, -1, True, 1 << 50])
def test_a_size_that_is_no_count_is_refused(value: Any) -> None:
    with pytest.raises(RlprofError, match=r"hidden_size=.* is not a count"):
        read_model(LLAMA | {"hidden_size": value})


def test_layer_types_of_another_model_are_refused() -> None:
    with pytest.raises(RlprofError, match="layer_types has 1 layers, num_hidden_layers 3"):
        read_model(LLAMA | {"layer_types": ["full_attention"]})


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot read the model"), ("{", "not JSON"), ("[1]", "not a JSON object")],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: str | None, reason: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RlprofError, match=reason):
        read_model(path)


@pytest.mark.deep
@pytest.mark.parametrize("name", KNOWN)
def test_defaults_are_those_of_transformers(name: str) -> None:
    """A file with little but sizes means what the class in transformers makes of it."""
    transformers = pytest.importorskip("transformers")
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip("transformers has no class of that name")
    needed = {"num_experts_per_tok": 6} if name == "deepseek_v2" else {}
    whole = transformers.CONFIG_MAPPING[name](**needed).to_dict()
    text = whole.get("text_config", whole)
    # Written by few: those that the class has a default for.
    optional = ("layer_types", "sliding_window", "head_dim", "tie_word_embeddings", "qkv_bias")
    optional += ("first_k_dense_replace", "attention_bias", "use_sliding_window")
    short = {key: value for key, value in text.items() if key not in optional}
    short = {**short, "model_type": name}
    if text is not whole:
        short = {**whole, "text_config": short}
    assert read_model(short).layers == read_model(whole).layers
    assert read_model(short).tied == read_model(whole).tied


def test_published_configurations_are_all_read() -> None:
    assert {read_model(each).model_type for each in CONFIGS.values()} <= {*KNOWN}


def test_the_page_names_all_types() -> None:
    page = (ROOT / "docs" / "efficiency.md").read_text()
    assert [name for name in KNOWN if f"`{name}`" not in page] == []
