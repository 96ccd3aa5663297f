"""Stand-ins, on the meta device, for kernels that keep less for backward than the operations they stand for.

Used while a model is profiled. A fused attention kernel keeps its inputs, its output and one fp32 number a query; the
meta device would run the unfused operations and keep every score.
Must never stand in where the device itself would run the unfused operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

UNFUSED = 0  # torch's number of the plain implementation (SDPBackend.MATH)
ROWS = 2  # dimensions of tokens by size, as experts take them


class _Fused(torch.autograd.Function):
    """Attention as flash kernels do it: query, key and value [batch, heads, length, size]."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, length, heads, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Grouped(torch.autograd.Function):
    """Rows [tokens, in] by the matrix of their expert [experts, in, out]: the inputs are kept, the output is new."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices, ends)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, matrices, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            torch.empty_like(rows) if wanted[0] else None,
            torch.empty_like(matrices) if wanted[1] else None,
            None,
        )


class _Stage3Linear(torch.autograd.Function):
    """A linear layer as DeepSpeed computes it at stage 3 (zero/linear.py): its input is kept, trained or frozen."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.biased = bias is not None
        output = inputs.matmul(weight.t())
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        (gradient,) = gradients
        wanted = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient.matmul(weight) if wanted[0] else None,
            flat.t().matmul(inputs.reshape(-1, inputs.shape[-1])) if wanted[1] else None,
            flat.sum(0) if ctx.biased and wanted[2] else None,
        )


def linear_of_stage3() -> contextlib.AbstractContextManager[None]:
    """Within it `linear` keeps what DeepSpeed's own keeps (zero_optimization.memory_efficient_linear)."""

    def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        output: torch.Tensor = _Stage3Linear.apply(inputs, weight, bias)
        return output

    return _in_place_of("linear", linear)


def attention_without_values() -> contextlib.AbstractContextManager[None]:
    """Within it `scaled_dot_product_attention` of meta tensors keeps what the real kernel would keep."""
    original = functional.scaled_dot_product_attention

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if _choice(query, key, value, *rest, **named) == UNFUSED:
            return original(query, key, value, *rest, **named)
        return _Fused.apply(query, key, value)

    return _in_place_of("scaled_dot_product_attention", attention)


def experts_of_any_type() -> contextlib.AbstractContextManager[None]:
    """Within it `grouped_mm` takes meta tensors of every type, as devices do; torch's own takes bfloat16 alone."""
    original = functional.grouped_mm

    def grouped(rows: torch.Tensor, matrices: torch.Tensor, *, offs: torch.Tensor | None = None, **named: Any) -> Any:
        asked_for_more = any(value is not None for value in named.values())
        if rows.dtype is torch.bfloat16 or offs is None or rows.dim() != ROWS or asked_for_more:
            return original(rows, matrices, offs=offs, **named)
        return _Grouped.apply(rows, matrices, offs)

    return _in_place_of("grouped_mm", grouped)


@contextlib.contextmanager
def _in_place_of(name: str, stand_in: Callable[..., Any]) -> Iterator[None]:
    """Within it torch.nn.functional's `name` is `stand_in`."""
    original = getattr(functional, name)
    setattr(functional, name, stand_in)
    try:
        yield
    finally:
        setattr(functional, name, original)


def _choice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> int:
    """The kernel that torch takes for such tensors on a CPU: one sample of few tokens is asked about."""
    names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    options = dict(zip(names, rest, strict=False)) | named
    few = [tensor.new_empty((1, tensor.shape[1], 4, tensor.shape[3]), device="cpu") for tensor in (query, key, value)]
    mask = options.get("attn_mask")
    small = None if mask is None else torch.zeros((1, 1, 4, 4), dtype=mask.dtype, device="cpu")
    return int(
        torch._fused_sdp_choice(
            *few,
            small,
            float(options.get("dropout_p") or 0.0),
            bool(options.get("is_causal")),
            scale=options.get("scale"),
            enable_gqa=bool(options.get("enable_gqa")),
        )
    )
