"""The fused kernels, in Triton. `models.kernels` calls them and explains each.

Knows pointers, strides and masks. Imported only if Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def center_pixels(pixels, out, total, CENTER: tl.constexpr, BLOCK: tl.constexpr):
    """out = pixels - CENTER, from uint8 to the type of out."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    tl.store(out + at, tl.load(pixels + at, mask=inside).to(tl.float32) - CENTER, mask=inside)


@triton.jit
def layer_norm(
    x,
    offset,
    weight,
    bias,
    out,
    num_rows,
    eps,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """LayerNorm of x + offset, one row a program. If MASKED, rows from num_rows[0] on become zeros."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    value = tl.load(x + row * COLUMNS + columns, mask=inside, other=0.0).to(tl.float32)
    pending = tl.load(offset + columns, mask=inside, other=0.0)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    value += pending
    mean = tl.sum(value, axis=0) / COLUMNS
    centered = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, axis=0) / COLUMNS + eps)
    result = centered * scale * gain + shift
    if MASKED:
        result = tl.where(row < tl.load(num_rows), result, 0.0)
    tl.store(out + row * COLUMNS + columns, result, mask=inside)


@triton.jit
def rotate(qkv, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Rotates q and k of one row [3, HEADS, 2 * HALF] in place, BLOCK pairs of values at a time."""
    row = tl.program_id(0).to(tl.int64)
    for start in tl.static_range(0, 2 * HEADS * HALF, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        inside = pair < 2 * HEADS * HALF
        column = pair % HALF
        c = tl.load(cos + row * HALF + column, mask=inside, other=0.0)
        s = tl.load(sin + row * HALF + column, mask=inside, other=0.0)
        at = qkv + row * (6 * HEADS * HALF) + pair // HALF * (2 * HALF) + column
        first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, first * c - second * s, mask=inside)
        tl.store(at + HALF, second * c + first * s, mask=inside)


@triton.jit(do_not_specialize=["num_images"])
def offsets(grids, cu_seqlens, num_images, BLOCK: tl.constexpr):
    """cu_seqlens [num_images + 1] of grids [num_images, 2], in one program."""
    slot = tl.arange(0, BLOCK)
    inside = slot < num_images
    height = tl.load(grids + 2 * slot, mask=inside, other=0)
    width = tl.load(grids + 2 * slot + 1, mask=inside, other=0)
    tl.store(cu_seqlens + slot + 1, tl.cumsum(height * width, axis=0), mask=inside)
    tl.store(cu_seqlens + slot, tl.zeros_like(slot), mask=slot == 0)


@triton.jit(do_not_specialize=["num_images"])
def add_positions(
    x,
    table,
    grids,
    cu_seqlens,
    frequencies,
    cos,
    sin,
    num_images,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SIDE: tl.constexpr,
    MERGE: tl.constexpr,
    QUARTER: tl.constexpr,
    QUARTER_BLOCK: tl.constexpr,
):
    """x += interpolated position embedding, and cosine and sine of the rotary angles; one row a program."""
    index = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    ends = tl.load(cu_seqlens + 1 + slot, mask=slot < num_images, other=2147483647)
    image = tl.minimum(tl.sum((ends <= index).to(tl.int32), axis=0), num_images - 1)
    within = index - tl.load(cu_seqlens + image)
    height = tl.maximum(tl.load(grids + 2 * image), MERGE)
    width = tl.maximum(tl.load(grids + 2 * image + 1), MERGE)
    block = within // (MERGE * MERGE)
    inside_block = within % (MERGE * MERGE)
    blocks_per_row = width // MERGE
    row = block // blocks_per_row * MERGE + inside_block // MERGE
    column = block % blocks_per_row * MERGE + inside_block % MERGE

    quarter = tl.arange(0, QUARTER_BLOCK)
    has = quarter < QUARTER
    frequency = tl.load(frequencies + quarter, mask=has, other=0.0)
    at = index.to(tl.int64) * (2 * QUARTER) + quarter
    by_row = row.to(tl.float32) * frequency
    by_column = column.to(tl.float32) * frequency
    tl.store(cos + at, tl.cos(by_row), mask=has)
    tl.store(sin + at, tl.sin(by_row), mask=has)
    tl.store(cos + at + QUARTER, tl.cos(by_column), mask=has)
    tl.store(sin + at + QUARTER, tl.sin(by_column), mask=has)

    down = row.to(tl.float32) * (SIDE - 1) / tl.maximum(height - 1, 1).to(tl.float32)
    across = column.to(tl.float32) * (SIDE - 1) / tl.maximum(width - 1, 1).to(tl.float32)
    top = tl.minimum(down.to(tl.int32), SIDE - 1)
    left = tl.minimum(across.to(tl.int32), SIDE - 1)
    bottom = tl.minimum(top + 1, SIDE - 1)
    right = tl.minimum(left + 1, SIDE - 1)
    down -= tl.floor(down)
    across -= tl.floor(across)
    columns = tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    value = tl.load(table + (top * SIDE + left) * COLUMNS + columns, mask=inside).to(tl.float32)
    embedding = value * ((1 - down) * (1 - across))
    value = tl.load(table + (top * SIDE + right) * COLUMNS + columns, mask=inside).to(tl.float32)
    embedding += value * ((1 - down) * across)
    value = tl.load(table + (bottom * SIDE + left) * COLUMNS + columns, mask=inside).to(tl.float32)
    embedding += value * (down * (1 - across))
    value = tl.load(table + (bottom * SIDE + right) * COLUMNS + columns, mask=inside).to(tl.float32)
    embedding += value * (down * across)
    at = x + index.to(tl.int64) * COLUMNS + columns
    tl.store(at, tl.load(at, mask=inside).to(tl.float32) + embedding, mask=inside)


@triton.jit
def mean_rows(x, stride, ends, out, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[image] = float32 mean of its rows of x, for a block of columns."""
    image = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    first = tl.load(ends + image)
    last = tl.load(ends + image + 1)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        at = x + row.to(tl.int64)[:, None] * stride + column[None, :]
        total += tl.load(at, mask=(row < last)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / tl.maximum(last - first, 1).to(tl.float32)
    tl.store(out + image.to(tl.int64) * columns + column, mean, mask=inside)
