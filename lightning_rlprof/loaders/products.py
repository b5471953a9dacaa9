"""Operators of torch that multiply matrices."""

__all__ = ["NPU_PRODUCTS", "PRODUCTS"]

_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention")
PRODUCTS = frozenset(
    [f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")]
    + [f"aten::_scaled_dot_product_{name}{way}" for name in _ATTENTION for way in ("", "_backward")]
)
"""Those that multiply matrices and call no other of them."""

NPU_PRODUCTS = PRODUCTS | {"aten::matmul"}
"""Those on Ascend: ``matmul`` is torch_npu's own there, and calls no other for an NPU's tensors."""
