# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What every launch of a Triton kernel settles on the host: sizes, precision, options, and where it may run."""

import contextlib
import functools

import torch

from .triton_configs import LaunchConfig, config_for


try:
    import triton
except ImportError as error:
    raise ImportError("the Triton kernels need the package triton: pip install triton") from error


# Whether kernels are interpreted is settled when they are defined, hence when these modules are first imported.
INTERPRETED = bool(triton.knobs.runtime.interpret)


def block_of(size: int) -> int:
    """The power of two, at least 16, that holds ``size``: what a product of tiles takes."""
    return max(16, 1 << (size - 1).bit_length())


def precision_of(dtype: torch.dtype) -> str:
    """How operands of products are rounded (`triton_math.dot`), from the dtype of q, k and v.

    bfloat16: as they are. float16: to tf32, which has its ten bits without its narrow range, for states and errors
    are products' operands too. float32: as `torch.set_float32_matmul_precision` says, "highest" by three tf32
    products.

    Raises:
        ValueError: another dtype.
    """
    if dtype == torch.bfloat16:
        return "bf16_bits" if INTERPRETED else "bf16"
    if dtype == torch.float16:
        return "tf32"
    if dtype == torch.float32:
        return "tf32x3" if _float32_precision() == "highest" else "tf32"
    raise ValueError(f"dtype of q, k and v is {dtype}, expected torch.bfloat16, torch.float16 or torch.float32")


def operand_bytes_of(precision: str) -> int:
    """What an element of a product's operand takes in shared memory, by `precision_of`."""
    return {"bf16": 2, "bf16_bits": 2, "tf32": 4, "tf32x3": 8}[precision]


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a kernel may load it: the interpreter's casts of 16-bit floats are wrong, it gets float32."""
    return tensor.float() if INTERPRETED else tensor


def capability_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The compute capability of the card that holds ``tensor``; None where kernels are interpreted.

    Raises:
        ValueError: neither is so: no kernel can run.
    """
    if INTERPRETED:
        return None
    if tensor.device.type != "cuda":
        raise ValueError(
            f"device is {tensor.device}: Triton kernels run on a CUDA device, or in Triton's interpreter if "
            "TRITON_INTERPRET=1 is set before they are first imported"
        )
    return _capability(tensor.device)


def by_layer(group: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The first layer's tensor, None where there is only one layer, and the last layer's."""
    if group is None:
        return None, None
    return (group[0] if len(group) == 2 else None), group[-1]


def launch_parameters(
    kernel: str,
    k: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    precision: str,
    config: LaunchConfig | None,
) -> tuple[LaunchConfig, dict[str, int], dict[str, int]]:
    """How a kernel is launched on keys (N, G, b, D) and weights (..., D_in, D_out) by layer.

    Args:
        kernel: its name in `triton_configs`. precision: of products, see `precision_of`.
        config: None: the default for these sizes.

    Returns:
        The configuration, the sizes that every kernel takes, and Triton's options.

    Raises:
        ValueError: as `capability_of`.
    """
    b, head_dim, hidden = *k.shape[-2:], weights[-1].shape[-2]
    capability = capability_of(k)
    config = config or config_for(kernel, head_dim, hidden, b, capability, operand_bytes_of(precision))
    sizes = {
        "DEPTH": len(weights),
        "D": head_dim,
        "H": hidden,
        "B": b,
        "BLOCK_D": block_of(head_dim),
        "BLOCK_B": block_of(b),
        "TILE": config.tile,
    }
    return config, sizes, {"num_warps": config.num_warps, "num_stages": config.num_stages}


def token_block(config: LaunchConfig, num_tokens: int) -> int:
    """Tokens that a kernel takes at a time, of those it can take so."""
    return min(block_of(num_tokens), config.tokens or block_of(num_tokens))


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Kernels go to the current device, which need not be the tensor's; compiled code sees to that itself."""
    if tensor.device.type != "cuda" or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


# Compilers cannot trace torch's getters; both answers are settled before a model runs.
@torch.compiler.assume_constant_result
def _float32_precision() -> str:
    return torch.get_float32_matmul_precision()


@torch.compiler.assume_constant_result
@functools.lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
