# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""What every launch of a Triton kernel settles on the host: blocks, precision, and where it may run."""

import functools

import torch


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
        return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
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


@functools.lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
