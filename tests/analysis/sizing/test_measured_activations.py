"""Bytes of activations per token and patch are those that torch keeps for transformers' models."""

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from lightning_rlprof.analysis.models.huggingface import read_model  # noqa: E402
from lightning_rlprof.analysis.sizing.memory import live_layer  # noqa: E402

TOKENS = 256


def kept_for_backward(model: Any, *inputs: Any, **options: Any) -> int:
    """Return bytes of all storages that autograd saves, without the parameters."""
    known = {each.untyped_storage().data_ptr() for each in model.parameters()}
    seen = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept, so no address repeats
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs, **options)
    return sum(size for size, _ in seen.values())


class Allocated(TorchDispatchMode):
    """Sums the bytes of tensors that exist, from their allocation to their end."""

    def __init__(self, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {each.untyped_storage()._cdata for each in model.parameters()}
        self.now = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                at = storage._cdata
                if at not in self.sizes and at not in self.known:
                    self.sizes[at] = storage.nbytes()
                    self.now += self.sizes[at]
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.free, at)
        return out

    def free(self, at: int) -> None:
        self.now -= self.sizes.pop(at)


def decoder(layers: int) -> tuple[Any, Any]:
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return config, transformers.LlamaForCausalLM(config).to(torch.bfloat16).model


def test_what_backward_needs_of_a_layer_and_what_a_forward_only_pass_has() -> None:
    ids = torch.zeros((1, TOKENS), dtype=torch.long)
    kept = []
    for layers in (2, 3):
        config, model = decoder(layers)
        kept.append(kept_for_backward(model, ids, use_cache=False))
    layer = read_model(config).layers[0]
    live = live_layer(layer, 256)
    assert (kept[1] - kept[0]) / TOKENS == pytest.approx(live, rel=0.02)
    counted = Allocated(model)
    with torch.no_grad(), counted:
        model(ids, use_cache=False)
    assert counted.peak / TOKENS == pytest.approx(8 * 256 + 6 * 896, rel=0.05)
    assert 0.5 * live < counted.peak / TOKENS < live
