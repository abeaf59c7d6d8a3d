# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Device functions that the Triton kernels share: products, GELU, layer normalisation, tiles of memory.

The functions of `inner_network` once more, for tiles that lie *features first*: a tile is (features, tokens). Tensor
cores want 64 rows or more on the left side of a product, and there are more features than tokens.

Letters: D head dimension, BD the power of two that holds it, BB the power of two that holds a chunk's tokens. Rows
behind D are zero in every tile that comes in, and stay so.
"""

from .triton_launch import INTERPRETED


try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the Triton kernels need the package triton: pip install triton") from error


# gelu(z) = z sigmoid(_SLOPE z + _CUBIC z^3); constants stand to the right of tensors, or the interpreter loses them.
_SLOPE: tl.constexpr = tl.constexpr(1.5957691216057308)
_CUBIC: tl.constexpr = tl.constexpr(0.07135481627260025)
_MINUS_SLOPE_BASE_2: tl.constexpr = tl.constexpr(-1.5957691216057308 * 1.4426950408889634)
_MINUS_CUBIC_BASE_2: tl.constexpr = tl.constexpr(-0.07135481627260025 * 1.4426950408889634)
# The interpreter knows no inline assembly.
_NATIVE: tl.constexpr = tl.constexpr(not INTERPRETED)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b``, accumulated in float32: every product of the kernels.

    Args:
        PRECISION: what the operands are rounded to. "bf16"; "bf16_bits": the same by integer arithmetic, for the
            interpreter, whose bfloat16 products and casts are wrong; "tf32"; "tf32x3": three products that together
            are nearly float32; "ieee": float32, without tensor cores.
    """
    if PRECISION == "bf16":
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    elif PRECISION == "bf16_bits":
        acc = tl.dot(round_to_bf16(a), round_to_bf16(b), acc, input_precision="ieee")
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    return acc


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """x as `dot` takes it: narrow as early as possible, for values that wait in registers for their product."""
    if PRECISION == "bf16":
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def round_to_bf16(x):
    """float32 -> the nearest bfloat16 (ties to even), still as float32. Finite values only."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _gelu_gate(z):
    # (1 + tanh(u)) / 2 is a sigmoid of 2u; this form loses nothing in either tail.
    power = z * (z * z * _MINUS_CUBIC_BASE_2 + _MINUS_SLOPE_BASE_2)
    if _NATIVE:
        # Triton's own exp2 and division take care of denormal numbers, which cannot occur in the denominator and do
        # not matter in the power. Not "pure": else the compiler evaluates all of it once more in every layout that
        # the result is wanted in, rather than move the result.
        gate = tl.inline_asm_elementwise(
            "{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
            "=f,f",
            [power],
            dtype=tl.float32,
            is_pure=False,
            pack=1,
        )
    else:
        gate = 1.0 / (1.0 + tl.exp2(tl.minimum(power, 127.0)))
    return gate


@triton.jit
def gelu(z):
    """The tanh form."""
    return z * _gelu_gate(z)


@triton.jit
def gelu_and_slope(z):
    """gelu(z) and gelu'(z)."""
    gate = _gelu_gate(z)
    value = z * gate
    return value, gate + value * (1.0 - gate) * (z * z * _CUBIC * 3.0 + _SLOPE)


@triton.jit
def gelu_slope_and_curvature(z):
    """gelu(z), gelu'(z) and gelu''(z)."""
    gate = _gelu_gate(z)
    inner = z * z * _CUBIC * 3.0 + _SLOPE
    falling = gate * (1.0 - gate)
    gate_slope = falling * inner
    gate_curvature = gate_slope * (1.0 - 2.0 * gate) * inner + falling * (z * _CUBIC * 6.0)
    return z * gate, gate + z * gate_slope, 2.0 * gate_slope + z * gate_curvature


@triton.jit
def normalize(f, features, eps, D: tl.constexpr):
    """LN without scale and shift over axis 0 of f (BD, BB): x_hat (BD, BB) and 1 / sigma (BB,).

    Args:
        features: arange(BD).
    """
    mean = tl.sum(f, 0) / D
    centered = f - mean[None, :]
    if D != f.shape[0]:
        centered = tl.where(features[:, None] < D, centered, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, 0) / D + eps)
    return centered * rstd[None, :], rstd


@triton.jit
def norm_jacobian(y, x_hat, rstd, features, D: tl.constexpr):
    """d x_hat / d f applied to y (BD, BB); the matrix is symmetric, so this is its transpose too."""
    mean = tl.sum(y, 0) / D
    along = tl.sum(y * x_hat, 0) / D
    projected = rstd[None, :] * (y - mean[None, :] - x_hat * along[None, :])
    if D != y.shape[0]:
        projected = tl.where(features[:, None] < D, projected, 0.0)
    return projected


@triton.jit
def layer_output(
    x, f, norm_weight, norm_bias, features, eps, D: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr
):
    """M(x) from the last layer's result f: the output (BD, BB), x_hat and 1 / sigma (without NORM: f and zeros).

    Args:
        x, f: (BD, BB) float32. norm_weight, norm_bias: (BD,), zero behind D; unused without NORM.
    """
    x_hat = f
    rstd = tl.zeros([f.shape[1]], tl.float32)
    output = f
    if NORM:
        x_hat, rstd = normalize(f, features, eps, D)
        output = x_hat * norm_weight[:, None] + norm_bias[:, None]
    if RESIDUAL:
        output = output + x
    return output, x_hat, rstd


@triton.jit
def top_error(
    k,
    v,
    f,
    norm_weight,
    norm_bias,
    features,
    eps,
    D: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    DOT: tl.constexpr,
):
    """The inner loss's gradients at the top, from f = (last layer's result at the key).

    Args:
        DOT: whether the loss is -<M(k), v>, not |M(k) - v|^2; f is then for LN alone.

    Returns:
        (error, g, x_hat, rstd): d loss / d M(k) and d loss / d f, both (BD, BB), and LN's intermediate values.
    """
    output, x_hat, rstd = layer_output(k, f, norm_weight, norm_bias, features, eps, D, RESIDUAL, NORM)
    if DOT:
        error = -v
    else:
        error = 2.0 * (output - v)
    g = error
    if NORM:
        g = norm_jacobian(error * norm_weight[:, None], x_hat, rstd, features, D)
    return error, g, x_hat, rstd


@triton.constexpr_function
def _fits(end, block):
    return end % block == 0


@triton.jit
def load_tile(
    base,
    rows,
    columns,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    ROW_END: tl.constexpr,
    COLUMN_END: tl.constexpr,
):
    """base[rows, columns], zero outside ROW_END x COLUMN_END, in the dtype that is stored.

    Args:
        rows, columns: arange(BLOCK) + a multiple of BLOCK below the end, so that an end that is a multiple of BLOCK
            needs no mask. base: advanced in int64 to the matrix; offsets inside the matrix fit int32.
    """
    pointers = base + (rows[:, None] * ROW_STRIDE + columns[None, :] * COLUMN_STRIDE)
    ROWS_FIT: tl.constexpr = _fits(ROW_END, rows.shape[0])
    COLUMNS_FIT: tl.constexpr = _fits(COLUMN_END, columns.shape[0])
    if ROWS_FIT and COLUMNS_FIT:
        tile = tl.load(pointers)
    elif ROWS_FIT:
        tile = tl.load(pointers, mask=columns[None, :] < COLUMN_END, other=0.0)
    elif COLUMNS_FIT:
        tile = tl.load(pointers, mask=rows[:, None] < ROW_END, other=0.0)
    else:
        tile = tl.load(pointers, mask=(rows[:, None] < ROW_END) & (columns[None, :] < COLUMN_END), other=0.0)
    return tile


@triton.jit
def store_tile(
    base,
    tile,
    rows,
    columns,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    ROW_END: tl.constexpr,
    COLUMN_END: tl.constexpr,
):
    """base[rows, columns] = tile inside ROW_END x COLUMN_END, cast to the stored dtype; arguments as `load_tile`."""
    pointers = base + (rows[:, None] * ROW_STRIDE + columns[None, :] * COLUMN_STRIDE)
    ROWS_FIT: tl.constexpr = _fits(ROW_END, rows.shape[0])
    COLUMNS_FIT: tl.constexpr = _fits(COLUMN_END, columns.shape[0])
    if ROWS_FIT and COLUMNS_FIT:
        tl.store(pointers, tile)
    elif ROWS_FIT:
        tl.store(pointers, tile, mask=columns[None, :] < COLUMN_END)
    elif COLUMNS_FIT:
        tl.store(pointers, tile, mask=rows[:, None] < ROW_END)
    else:
        tl.store(pointers, tile, mask=(rows[:, None] < ROW_END) & (columns[None, :] < COLUMN_END))


@triton.jit
def load_row(base, index, END: tl.constexpr):
    """base[index] of a contiguous float vector, zero behind END; index: arange(BLOCK), BLOCK >= END."""
    return tl.load(base + index, mask=index < END, other=0.0)


@triton.jit
def computed_once(tile):
    """The tile, to be put around a loaded tile of which multiples then stand in products.

    Without it the compiler takes the tile's elements to where each product wants them before it multiplies, and
    several warps multiply the same elements. A comparison with an index it does not move, though this one holds for
    every element and costs nothing.
    """
    return tl.where(tl.arange(0, tile.shape[0])[:, None] < tile.shape[0], tile, 0.0)
