# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""How the Triton kernels are launched: for each kernel the configurations that are tested, and the one to take.

Nothing is tuned at run time: a training run that is started again must take the same kernels and give the same
numbers. `benchmarks/gpu.py` measures the configurations of each kernel; a better default is a line in `DEFAULTS`.

Sizes: D head dimension, h width of the last layer's input (the hidden width, or D for a memory of one layer), b chunk.
"""

from typing import NamedTuple


class LaunchConfig(NamedTuple):
    """Launch parameters of a kernel.

    Attributes:
        tile: columns of the last layer's input that are taken at a time; 0: the kernel has no tiles.
        num_warps, num_stages: Triton's.
        tokens: tokens of a chunk that are taken at a time, where the kernel can do so (writer and factors: keys;
            reader and its backward: queries); 0: all of them.
    """

    tile: int
    num_warps: int
    num_stages: int = 1
    tokens: int = 0


class Default(NamedTuple):
    """A kernel's configuration for sizes up to these, on cards of at least this compute capability.

    ``operand_bytes``: of a product's operand in shared memory: 2 for bfloat16, 4 for tf32, 8 for three tf32 products.
    """

    config: LaunchConfig
    head_dim: int = 256
    hidden: int = 1024
    chunk_size: int = 128
    capability: tuple[int, int] = (0, 0)
    operand_bytes: int = 8


# What is tested and measured, by kernel.
CONFIGS: dict[str, tuple[LaunchConfig, ...]] = {
    "coefficients": (LaunchConfig(0, 1), LaunchConfig(0, 2)),
    "writer": (
        LaunchConfig(64, 8),
        LaunchConfig(64, 4),
        LaunchConfig(64, 8, 2),
        LaunchConfig(32, 8, 3),
        LaunchConfig(32, 8),
        LaunchConfig(32, 4),
        LaunchConfig(32, 8, tokens=64),
        LaunchConfig(32, 8, tokens=32),
        LaunchConfig(16, 8, tokens=16),
    ),
    "factors": (
        LaunchConfig(64, 4),
        LaunchConfig(64, 8),
        LaunchConfig(32, 8),
        LaunchConfig(32, 8, tokens=64),
        LaunchConfig(32, 8, tokens=32),
        LaunchConfig(16, 8, tokens=16),
    ),
    "reader": (
        LaunchConfig(64, 4),
        LaunchConfig(64, 8),
        LaunchConfig(64, 8, 2),
        LaunchConfig(32, 8),
        LaunchConfig(32, 8, tokens=64),
        LaunchConfig(32, 8, tokens=32),
        LaunchConfig(32, 4, tokens=32),
        LaunchConfig(16, 8, tokens=32),
        LaunchConfig(16, 8, tokens=16),
    ),
    "reader_backward": (
        LaunchConfig(64, 8),
        LaunchConfig(32, 4),
        LaunchConfig(32, 8),
        LaunchConfig(16, 4),
        LaunchConfig(16, 8),
        LaunchConfig(16, 8, tokens=16),
        LaunchConfig(16, 8, tokens=32),
        LaunchConfig(16, 8, tokens=64),
    ),
    "writer_backward": (
        LaunchConfig(64, 8),
        LaunchConfig(32, 4),
        LaunchConfig(32, 8),
        LaunchConfig(16, 4),
        LaunchConfig(16, 8),
    ),
    "coefficients_backward": (LaunchConfig(0, 1), LaunchConfig(0, 2)),
    "decode": (
        LaunchConfig(32, 4),
        LaunchConfig(16, 8),
        LaunchConfig(32, 8),
        LaunchConfig(64, 8),
        LaunchConfig(32, 4, 2),
        LaunchConfig(32, 8, 2),
    ),
}

# The first line that fits is taken; a kernel that fits none takes the first of its configurations.
DEFAULTS: dict[str, tuple[Default, ...]] = {
    "writer": (
        Default(LaunchConfig(64, 8), head_dim=64, chunk_size=64, capability=(9, 0), operand_bytes=2),
        Default(LaunchConfig(32, 8), head_dim=64, operand_bytes=2),
        Default(LaunchConfig(32, 8), head_dim=64, chunk_size=64, operand_bytes=4),
        Default(LaunchConfig(32, 8), head_dim=128, chunk_size=64, operand_bytes=2),
        Default(LaunchConfig(32, 8, tokens=64), head_dim=128, operand_bytes=2),
        Default(LaunchConfig(32, 8, tokens=32), operand_bytes=4),
        Default(LaunchConfig(32, 8, tokens=32), head_dim=64),
        Default(LaunchConfig(16, 8, tokens=16)),
    ),
    "factors": (
        Default(LaunchConfig(64, 4), head_dim=64, chunk_size=64, operand_bytes=2),
        Default(LaunchConfig(32, 8, tokens=64), head_dim=128, operand_bytes=2),
        Default(LaunchConfig(32, 8, tokens=32), operand_bytes=4),
        Default(LaunchConfig(32, 8, tokens=32), head_dim=64),
        Default(LaunchConfig(16, 8, tokens=16)),
    ),
    "reader": (
        Default(LaunchConfig(64, 8), head_dim=64, chunk_size=64, capability=(10, 0), operand_bytes=2),
        Default(LaunchConfig(64, 4), head_dim=64, chunk_size=64, capability=(9, 0), operand_bytes=2),
        Default(LaunchConfig(32, 4, tokens=32), head_dim=64, chunk_size=64, operand_bytes=2),
        Default(LaunchConfig(32, 8, tokens=64), head_dim=64, capability=(9, 0), operand_bytes=2),
        Default(LaunchConfig(32, 8, tokens=32), head_dim=128, operand_bytes=2),
        Default(LaunchConfig(32, 8, tokens=32), head_dim=64, operand_bytes=4),
        Default(LaunchConfig(16, 8, tokens=32), head_dim=64, chunk_size=64),
        Default(LaunchConfig(16, 8, tokens=16)),
    ),
    "decode": (
        Default(LaunchConfig(32, 4), head_dim=64, chunk_size=64, operand_bytes=4),
        Default(LaunchConfig(32, 8), head_dim=64, chunk_size=64),
        Default(LaunchConfig(16, 8)),
    ),
    "reader_backward": (
        Default(LaunchConfig(32, 8), head_dim=64, chunk_size=64, capability=(10, 0), operand_bytes=2),
        Default(LaunchConfig(16, 4), head_dim=64, chunk_size=64, capability=(9, 0), operand_bytes=2),
        Default(LaunchConfig(32, 8), head_dim=64, chunk_size=64, operand_bytes=2),
        Default(LaunchConfig(16, 8), chunk_size=64, operand_bytes=2),
        Default(LaunchConfig(16, 8), head_dim=64, chunk_size=64),
        Default(LaunchConfig(16, 8, tokens=64), head_dim=128, operand_bytes=2),
        Default(LaunchConfig(16, 8, tokens=32), head_dim=128, operand_bytes=4),
        Default(LaunchConfig(16, 8, tokens=32), chunk_size=64, operand_bytes=4),
        Default(LaunchConfig(16, 8, tokens=32), operand_bytes=2),
        Default(LaunchConfig(16, 8, tokens=32), head_dim=64),
        Default(LaunchConfig(16, 8, tokens=16)),
    ),
    "writer_backward": (
        Default(LaunchConfig(32, 8), head_dim=64, chunk_size=64, capability=(9, 0), operand_bytes=2),
        Default(LaunchConfig(16, 8)),
    ),
}


def config_for(
    kernel: str,
    head_dim: int,
    hidden: int,
    chunk_size: int,
    capability: tuple[int, int] | None,
    operand_bytes: int = 2,
) -> LaunchConfig:
    """The launch configuration of a kernel.

    Args:
        kernel: its name, a key of `CONFIGS`.
        head_dim, hidden, chunk_size: D, h and b.
        capability: the card's compute capability; None where kernels are interpreted.
        operand_bytes: see `Default`.

    Returns:
        The configuration, its tile not wider than h rounded up to a power of two.

    Raises:
        ValueError: there is no such kernel.
    """
    if kernel not in CONFIGS:
        raise ValueError(f"kernel is {kernel!r}, expected one of {sorted(CONFIGS)}")
    for line in DEFAULTS.get(kernel, ()):
        fits = head_dim <= line.head_dim and hidden <= line.hidden and chunk_size <= line.chunk_size
        fits = fits and operand_bytes <= line.operand_bytes
        if fits and (capability or (0, 0)) >= line.capability:
            return clipped(line.config, hidden)
    return clipped(CONFIGS[kernel][0], hidden)


def clipped(config: LaunchConfig, hidden: int) -> LaunchConfig:
    """The configuration with a tile that is not wider than h rounded up to a power of two."""
    widest = max(16, 1 << (hidden - 1).bit_length())
    return config._replace(tile=min(config.tile, widest))
