# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Triton kernels share: scans in float64, and buffers that show what is written beside them.

Letters: N chunks, G rows times heads, b tokens in a chunk of which b_q are read, D head dimension, h hidden width.
"""

import math

import torch

from transformers_titans.chunk_scan import ScanInputs, ScanOptions
from transformers_titans.scan_inputs import RULES


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Relative error allowed against float64. Operands of products are rounded to 8 bits for bfloat16 and to 11 for
# float16 (as tf32), and a result takes a few such products one after another; float32 has 24 throughout.
ALLOWED = {torch.float32: 2e-5, torch.float16: 4 * 2.0**-11, torch.bfloat16: 4 * 2.0**-8}

_GUARD = 64

# Scans under the other rules: the rule, what `scan_inputs` takes, and whether M has a residual.
MATRIX = {"depth": 1, "norm": False}
RULE_SCANS = {
    "dla": ("dla", {}, True),
    "dla_plain": (
        "dla",
        {"D": 48, "h": 80, "b": 37, "norm": False, "forget_to": True, "restart": True, "G": 1},
        False,
    ),
    # Forgetting to zero scales a single layer, of which LN shows nothing: what alpha's gradient then is, is rounding.
    "dla_depth1": ("dla", {"depth": 1, "b": 21, "full": True, "forget_to": True}, True),
    "linear_attention": ("linear_attention", {"b": 16} | MATRIX, False),
    "swla": ("swla", {"D": 48, "b": 37, "full": True, "restart": True, "forget_to": True, "N": 3} | MATRIX, False),
    "swla_of_single_tokens": ("swla", {"b": 1, "N": 3} | MATRIX, False),
}


def scan_inputs(
    N: int = 2,
    G: int = 2,
    b: int = 24,
    D: int = 16,
    *,
    b_q: int | None = None,
    h: int | None = None,
    depth: int = 2,
    norm: bool = True,
    forget_to: bool = False,
    full: bool = False,
    restart: bool = False,
) -> ScanInputs:
    """Float64 inputs of a stable inner loop, gates around theta 0.05, alpha 0.01, eta 0.5.

    Args:
        h: default 2 D. b_q: default b. full, restart: whether about half of the chunks stay open, or begin anew.
    """

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, device=DEVICE)

    def unit(*shape):
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    def chance(*shape):
        return torch.rand(*shape, dtype=torch.float64, device=DEVICE)

    widths = [D, *[h or 2 * D] * (depth - 1), D]
    shapes = [(G, *pair) for pair in zip(widths[:-1], widths[1:], strict=True)]

    def states(scale):
        return tuple(scale * normal(*shape) / math.sqrt(shape[1] / D) for shape in shapes)

    return ScanInputs(
        unit(N, G, b if b_q is None else b_q, D),
        unit(N, G, b, D),
        unit(N, G, b, D),
        *(scale * chance(N, G, b) for scale in (0.1, 0.02, 1.0)),
        full=chance(N, G) < 0.5 if full else None,
        restart=chance(N, G) < 0.5 if restart else None,
        norm_weight=(1 + 0.1 * normal(G, 1, D)) / math.sqrt(D) if norm else None,
        norm_bias=0.1 * normal(G, 1, D) if norm else None,
        weights=states(1.0),
        momentum=states(0.01),
        forget_to=states(0.5) if forget_to else None,
        start_weights=states(1.0) if restart else None,
        start_momentum=states(0.01) if restart else None,
    )


def scan_options(
    inputs: ScanInputs, *, residual: bool = True, write: bool = True, surprise: bool = True, rule: str = "titans"
) -> ScanOptions:
    """Options that fit the inputs."""
    restart_at = frozenset() if inputs.restart is None else frozenset(inputs.restart.any(1).nonzero()[:, 0].tolist())
    return ScanOptions(len(inputs.weights), residual, 1e-6, write, restart_at, surprise, rule=RULES[rule])


def map_inputs(function, inputs: ScanInputs) -> ScanInputs:
    """The function on each floating-point tensor."""
    flat = [function(t) if t is not None and t.is_floating_point() else t for t in inputs.flatten()]
    return ScanInputs.unflatten(flat, len(inputs.weights))


def in_dtype(inputs: ScanInputs, dtype: torch.dtype) -> ScanInputs:
    """q, k and v in ``dtype``, everything else in float32."""
    tokens = {name: getattr(inputs, name).to(dtype) for name in ("q", "k", "v")}
    return map_inputs(torch.Tensor.float, inputs)._replace(**tokens)


class Guards:
    """Tensors that lie inside larger buffers of NaN, so that what is read beside them shows, and what is written."""

    def __init__(self):
        self._buffers: list[tuple[torch.Tensor, int]] = []

    def __call__(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """A contiguous copy, guarded on both sides; integers are guarded by their largest value."""
        if tensor is None:
            return None
        floating = tensor.is_floating_point()
        fill = math.nan if floating else torch.iinfo(torch.uint8 if tensor.dtype == torch.bool else tensor.dtype).max
        dtype = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
        buffer = torch.full((tensor.numel() + 2 * _GUARD,), fill, dtype=dtype, device=tensor.device)
        self._buffers.append((buffer, tensor.numel()))
        inside = buffer[_GUARD : _GUARD + tensor.numel()].view(tensor.dtype).view(tensor.shape)
        return inside.copy_(tensor)

    def empty(self, *shape: int) -> torch.Tensor:
        """A guarded float32 tensor of NaN."""
        return self(torch.full(shape, math.nan, device=DEVICE))

    def check(self) -> None:
        """Fails if anything outside the tensors was written."""
        assert self._buffers
        for buffer, size in self._buffers:
            outside = torch.cat([buffer[:_GUARD], buffer[_GUARD + size :]])
            untouched = outside.isnan() if outside.is_floating_point() else outside == torch.iinfo(outside.dtype).max
            assert untouched.all()
