"""RMSNorm and layer normalisation in Triton: forward, also with a float8 result, and a deterministic backward.

Rows that fit in the registers of a program are read once; a program processes several narrow rows at a time. Wider rows
are read in blocks, twice. The number of programs is limited so that the rows in progress stay in the L2 cache for the
second read.

The backward kernel is persistent: each program loops over every P-th tile of rows, accumulates dweight in registers,
and writes one partial row at the end. A second kernel adds the partial rows in a fixed order, so equal inputs give
equal bits. For rows that are too wide for this, one kernel computes a scalar per row, and a second one, whose programs
each own a range of columns, does the rest.

Only :func:`forward_tiling`, :func:`backward_tiling` and :func:`sum_tiling` decide how a kernel is tiled.

Shapes: x, residual, dy, ds and s are (outer, inner, N) with adjacent columns; row r is [r // inner, r % inner]. The
kernels write contiguous (M, N).
"""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from rmsnorm_fused.impl.triton_launch import launch
from rmsnorm_fused.options import LARGEST_FLOAT8, Options
from rmsnorm_fused.validation import wide_dtype

_TILE = 4096  # elements of a program's tile, unless measurements chose another size
_FORWARD_TILE = 2048  # elements of a program's tile of several narrow rows
_BACKWARD_TILE = 32768  # bytes of a program's tile in the accumulating type: 32 float32 per thread
_FORWARD_ROW = 131072  # bytes, in the accumulating type, of the widest row that is read once: 32 float32 per thread
_BACKWARD_ROW = 65536  # the same backward, where x, dy and the sums of a row take 96 of 128 registers
_MOST_ROWS = 1024  # of a program's tile backward: adding up the columns of more takes more shared memory than there is
_WIDE_SUMS = 1024  # columns per program of the kernel whose programs own columns
_RESERVED_SHARED = 8192  # bytes of shared memory per program outside the ring: reductions, the driver's share


def unavailable(device_type: str) -> str | None:
    """Say why these kernels cannot run on a type of device, with the remedy; None if they can."""
    if device_type == "cuda" or interpreted():
        return None
    return "Triton runs on a CPU only under its interpreter (set TRITON_INTERPRET=1 before Python starts; slow)"


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels; Triton itself reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


_INTERPRETED: tl.constexpr = tl.constexpr(interpreted())
_LARGEST: tl.constexpr = tl.constexpr(LARGEST_FLOAT8)


# ---- how the kernels are tiled; cached, because Triton's next_power_of_2 and cdiv are slow on the host


@dataclass(frozen=True)
class Tiling:
    """How a kernel is tiled.

    Attributes:
        rows: Rows that one program processes at a time.
        columns: Columns processed at a time, a power of two.
        warps: Warps per program.
        programs: Persistent programs per multiprocessor; 0.5 is one on every other multiprocessor. 0 launches one
            program for every tile of rows instead.
        stages: Most iterations of the loop in flight, including the current one.
        reload: Whether the weight is read again for each row, instead of kept in registers.
    """

    rows: int
    columns: int
    warps: int
    programs: float = 0
    stages: int = 1
    reload: bool = False

    def stages_within(self, bytes_a_row: int, shared_bytes: int) -> int:
        """The number of stages for which the ring of tiles fits in the shared memory of a multiprocessor."""
        ring = shared_bytes / max(self.programs, 1) - _RESERVED_SHARED
        return 1 + max(min(int(ring / (self.rows * bytes_a_row)), self.stages - 1), 0)


@functools.cache
def forward_tiling(columns: int, wide_bytes: int) -> Tiling:
    """The tiling of the forward kernels."""
    width = triton.next_power_of_2(columns)
    if width * wide_bytes > _FORWARD_ROW:
        return Tiling(1, _FORWARD_ROW // wide_bytes, warps=32, programs=2)
    if width > _TILE:
        return Tiling(1, width, warps=_warps(width, 32))
    rows = 2 if width == _TILE else max(_FORWARD_TILE // width, 1)
    return Tiling(rows, width, warps=_warps(rows * width, 16))


@functools.cache
def backward_tiling(columns: int, wide_bytes: int) -> Tiling:
    """The tiling of the backward kernels; one narrower than a row is for the kernel whose programs own columns."""
    width = triton.next_power_of_2(columns)
    if width * wide_bytes > _BACKWARD_ROW:
        return Tiling(1, _WIDE_SUMS, warps=4, programs=4, stages=4)
    if width * wide_bytes > _BACKWARD_TILE:
        return Tiling(1, width, warps=32, programs=1, stages=6, reload=True)
    # One program per multiprocessor, a large tile and three stages reached 94 %; two smaller programs reached 83 %.
    rows = min(max(_BACKWARD_TILE // wide_bytes // width, 1), _MOST_ROWS)
    return Tiling(rows, width, warps=8, programs=1, stages=3)


@functools.cache
def sum_tiling(columns: int) -> Tiling:
    """The tiling of the kernel that adds partial rows: about 256 programs, their loads in flight at once."""
    width = min(max(triton.next_power_of_2(columns) // 256, 16), 128)
    return Tiling(_TILE // width, width, warps=8)


def _smaller(a: int, b: int) -> int:
    return torch.sym_min(a, b)


def _tiles(elements: int, a_tile: int) -> int:
    """The number of tiles; the last one may be partial."""
    return -(-elements // a_tile)


def _warps(elements: int, elements_a_thread: int) -> int:
    return min(max(elements // elements_a_thread // 32, 1), 32)  # at most 1024 threads


# ---- device code


@triton.jit
def _row_offsets(rows, inner, outer_stride, inner_stride):
    # 64 bits: a tensor may hold more than 2^31 elements.
    return tl.cast(rows // inner, tl.int64) * outer_stride + tl.cast(rows % inner, tl.int64) * inner_stride


@triton.jit
def _narrow(value, dtype: tl.constexpr):
    """The nearest number of a dtype, ties to even."""
    if dtype == tl.bfloat16:
        value = value.to(tl.float32)
        if _INTERPRETED:  # the interpreter truncates the lower bits
            bits = value.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            value = tl.where(value == value, bits.to(tl.float32, bitcast=True), value)  # NaN would carry into the sign
    return value.to(dtype)


@triton.jit
def _float8(value, HARDWARE: tl.constexpr):
    """The bits of the nearest float8_e4m3fn, ties to even, clamped to the finite range."""
    value = tl.clamp(value, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if HARDWARE:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Keeps three of the 23 significand bits, and changes the exponent's bias from 127 to 7.
    code = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6, numbers are 2^-9 apart, like float32 numbers from 2^14 on, so the addition rounds.
    subnormal = (tl.abs(value) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, subnormal, code)
    code = tl.where(value != value, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _load_weight(weight, column, in_row, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr):
    if HAS_WEIGHT:
        w = tl.load(weight + column, mask=in_row, other=0.0).to(WIDE)
        if OFFSET != 0.0:
            w += OFFSET
        return w
    else:  # noqa: RET505  (Triton evaluates this branch at compile time)
        return tl.full(column.shape, 1.0, WIDE)


@triton.jit
def _normalised(wide, rstd, w, dtype: tl.constexpr, LLAMA: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """Y before its last rounding."""
    out = wide * rstd
    if LLAMA:
        out = _narrow(out, dtype).to(wide.dtype)
    if HAS_WEIGHT:
        out = out * w
    return out


@triton.jit
def _largest(values, inside, axis: tl.constexpr):
    """The bits of the largest magnitude. Bits of non-negative floats are ordered, with NaN above infinity."""
    return tl.max(tl.where(inside, tl.abs(values).to(tl.int32, bitcast=True), 0), axis=axis)


@triton.jit
def _scale_of(largest):
    """A row's scale, from the bits of its largest magnitude; 1 for a row of zeros."""
    scale = largest.to(tl.float32, bitcast=True) / _LARGEST
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _inverse(scale):
    # Finite for a subnormal scale too, so that zeros stay zeros.
    return tl.minimum(1.0 / scale, 3.4028234e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _with_bias(out, bias, column, in_row, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        out += tl.load(bias + column, mask=in_row, other=0.0).to(out.dtype)
    return out


@triton.jit
def _norm_forward(
    x, residual, weight, bias, scale, y, s, rstd, row_scales, row_count, columns,
    x_inner, x_outer_stride, x_inner_stride, residual_inner, residual_outer_stride, residual_inner_stride,
    EPS: tl.constexpr, OFFSET: tl.constexpr, LLAMA: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr,
    FLOAT8: tl.constexpr, FLOAT8_HARDWARE: tl.constexpr, WIDE: tl.constexpr,
    INDEX: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_row = column < (COLUMNS if EXACT else columns)
    inside = (row < row_count)[:, None] & in_row[None, :]
    out_offsets = (row.to(tl.int64) * columns)[:, None] + column[None, :]
    x_row = x + _row_offsets(row, x_inner, x_outer_stride, x_inner_stride)
    wide = tl.load(x_row[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy=EVICT).to(WIDE)
    if HAS_RESIDUAL:
        residual_row = residual + _row_offsets(row, residual_inner, residual_outer_stride, residual_inner_stride)
        added = tl.load(residual_row[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy=EVICT)
        wide += added.to(WIDE)
        narrow = _narrow(wide, s.dtype.element_ty)
        tl.store(s + out_offsets, narrow, mask=inside)
        wide = narrow.to(WIDE)
    w = _load_weight(weight, column, in_row, HAS_WEIGHT, OFFSET, WIDE)[None, :]
    if CENTRED:
        mean = tl.sum(wide, axis=1) / columns
        wide = tl.where(inside, wide - mean[:, None], 0.0)
    r = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / columns + EPS)
    out = _normalised(wide, r[:, None], w, dtype, LLAMA, HAS_WEIGHT)
    out = _with_bias(out, bias, column[None, :], in_row[None, :], HAS_BIAS)
    if FLOAT8 == "":
        if CENTRED:
            tl.store(rstd + 2 * row.to(tl.int64), mean, mask=row < row_count)
            tl.store(rstd + 2 * row.to(tl.int64) + 1, r, mask=row < row_count)
        else:
            tl.store(rstd + row, r, mask=row < row_count)
        tl.store(y + out_offsets, _narrow(out, dtype), mask=inside)
    else:
        if FLOAT8 == "static":
            inverse = _inverse(tl.load(scale))
        else:
            row_scale = _scale_of(_largest(out, in_row[None, :], axis=1))
            tl.store(row_scales + row, row_scale, mask=row < row_count)
            inverse = _inverse(row_scale)[:, None]
        tl.store(y + out_offsets, _float8(out * inverse, FLOAT8_HARDWARE), mask=inside)


@triton.jit
def _norm_forward_wide(
    x, residual, weight, bias, scale, y, s, rstd, row_scales, row_count, columns,
    x_inner, x_outer_stride, x_inner_stride, residual_inner, residual_outer_stride, residual_inner_stride,
    EPS: tl.constexpr, OFFSET: tl.constexpr, LLAMA: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr,
    FLOAT8: tl.constexpr, FLOAT8_HARDWARE: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    blocks = tl.cdiv(columns, COLUMNS)
    for row in tl.range(tl.program_id(0), row_count, tl.num_programs(0)):
        source = x + _row_offsets(row, x_inner, x_outer_stride, x_inner_stride)
        out_row = tl.cast(row, tl.int64) * columns
        sums = tl.zeros((COLUMNS,), WIDE)
        for block in tl.range(0, blocks, num_stages=STAGES):
            column = block * COLUMNS + tl.arange(0, COLUMNS)
            inside = column < columns
            wide = tl.load(source + column, mask=inside, other=0.0, eviction_policy="evict_last").to(WIDE)
            if HAS_RESIDUAL:
                residual_row = residual + _row_offsets(
                    row, residual_inner, residual_outer_stride, residual_inner_stride
                )
                wide += tl.load(residual_row + column, mask=inside, other=0.0).to(WIDE)
                narrow = _narrow(wide, s.dtype.element_ty)
                tl.store(s + out_row + column, narrow, mask=inside)
                wide = narrow.to(WIDE)
            if CENTRED:
                sums += wide
            else:
                sums += wide * wide
        if HAS_RESIDUAL:
            tl.debug_barrier()  # s is read back below, possibly by other threads than those that wrote it
            source = s + out_row
        mean = tl.cast(0.0, WIDE)
        if CENTRED:
            mean = tl.sum(sums, axis=0) / columns
            sums = tl.zeros((COLUMNS,), WIDE)
            for block in tl.range(0, blocks, num_stages=STAGES):
                column = block * COLUMNS + tl.arange(0, COLUMNS)
                wide = tl.load(source + column, mask=column < columns, other=0.0, eviction_policy="evict_last").to(WIDE)
                wide = tl.where(column < columns, wide - mean, 0.0)
                sums += wide * wide
        r = 1.0 / tl.sqrt(tl.sum(sums, axis=0) / columns + EPS)
        inverse = tl.cast(1.0, WIDE)
        if FLOAT8 == "":
            if CENTRED:
                tl.store(rstd + 2 * tl.cast(row, tl.int64), mean)
                tl.store(rstd + 2 * tl.cast(row, tl.int64) + 1, r)
            else:
                tl.store(rstd + row, r)
        elif FLOAT8 == "static":
            inverse = _inverse(tl.load(scale))
        else:
            largest = tl.cast(0, tl.int32)
            for block in tl.range(0, blocks):
                column = block * COLUMNS + tl.arange(0, COLUMNS)
                inside = column < columns
                wide = tl.load(source + column, mask=inside, other=0.0).to(WIDE)
                w = _load_weight(weight, column, inside, HAS_WEIGHT, OFFSET, WIDE)
                out = _normalised(wide, r, w, dtype, LLAMA, HAS_WEIGHT)
                largest = tl.maximum(largest, _largest(out, inside, axis=0))
            row_scale = _scale_of(largest)
            tl.store(row_scales + row, row_scale)
            inverse = _inverse(row_scale)
        for back in tl.range(0, blocks, num_stages=STAGES):
            # Starts at the end of the row, which was read last and is most likely still in the cache.
            column = (blocks - 1 - back) * COLUMNS + tl.arange(0, COLUMNS)
            inside = column < columns
            wide = tl.load(source + column, mask=inside, other=0.0, eviction_policy="evict_first").to(WIDE)
            if CENTRED:
                wide -= mean
            w = _load_weight(weight, column, inside, HAS_WEIGHT, OFFSET, WIDE)
            out = _normalised(wide, r, w, dtype, LLAMA, HAS_WEIGHT)
            out = _with_bias(out, bias, column, inside, HAS_BIAS)
            if FLOAT8 == "":
                tl.store(y + out_row + column, _narrow(out, dtype), mask=inside)
            else:
                tl.store(y + out_row + column, _float8(out * inverse, FLOAT8_HARDWARE), mask=inside)


@triton.jit
def _gradient_of_normalised(dy, w, dtype: tl.constexpr, LLAMA: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    g = dy
    if HAS_WEIGHT:
        g = dy * w
        if LLAMA:
            g = _narrow(g, dtype).to(dy.dtype)
    return g


@triton.jit
def _load_of_row(at, in_rows):
    if in_rows is None:
        return tl.load(at)
    else:  # noqa: RET505  (Triton evaluates this branch at compile time)
        return tl.load(at, mask=in_rows, other=0.0)


@triton.jit
def _moments(rstd, row, in_rows, CENTRED: tl.constexpr, WIDE: tl.constexpr):
    """The mean, zero unless centred, and rstd of rows."""
    if CENTRED:
        at = rstd + 2 * tl.cast(row, tl.int64)
        return _load_of_row(at, in_rows), _load_of_row(at + 1, in_rows)
    else:  # noqa: RET505  (likewise)
        return tl.cast(0.0, WIDE), _load_of_row(rstd + row, in_rows)


@triton.jit
def _standardised(wide, mean, r, CENTRED: tl.constexpr):
    if CENTRED:
        wide -= mean
    return wide * r


@triton.jit
def _weight_terms(dy, normalised, dtype: tl.constexpr, LLAMA: tl.constexpr):
    if LLAMA:
        normalised = _narrow(normalised, dtype).to(dy.dtype)
    return dy * normalised


@triton.jit
def _norm_backward(
    dy, ds, s, weight, rstd, dx, dresidual, partials, row_count, columns,
    dy_inner, dy_outer_stride, dy_inner_stride, ds_inner, ds_outer_stride, ds_inner_stride,
    s_inner, s_outer_stride, s_inner_stride,
    OFFSET: tl.constexpr, LLAMA: tl.constexpr, HAS_DS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    CENTRED: tl.constexpr, HAS_DRESIDUAL: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr, WIDE: tl.constexpr,
    INDEX: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, RELOAD: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = s.dtype.element_ty
    column = tl.arange(0, COLUMNS)
    in_row = column < (COLUMNS if EXACT else columns)
    if not RELOAD:
        w = _load_weight(weight, column, in_row, HAS_WEIGHT, OFFSET, WIDE)[None, :]
    # FOLD: the rows of a tile are in the same threads, which add them before they accumulate.
    sums = tl.zeros((1 if FOLD else ROWS, COLUMNS), WIDE)
    bias_sums = tl.zeros((1 if FOLD else ROWS, COLUMNS) if CENTRED else (1, 1), WIDE)
    for tile in tl.range(tl.program_id(0), tl.cdiv(row_count, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(tile, INDEX) * ROWS + tl.arange(0, ROWS)
        in_rows = row < row_count
        inside = in_row[None, :]
        if ROWS > 1:
            inside = in_rows[:, None] & inside
        s_row = s + _row_offsets(row, s_inner, s_outer_stride, s_inner_stride)
        dy_row = dy + _row_offsets(row, dy_inner, dy_outer_stride, dy_inner_stride)
        wide = tl.load(s_row[:, None] + column[None, :], mask=inside, other=0.0).to(WIDE)
        dy_tile = tl.load(dy_row[:, None] + column[None, :], mask=inside, other=0.0).to(WIDE)
        mean, r = _moments(rstd, row, in_rows, CENTRED, WIDE)
        r = r[:, None]
        if CENTRED:
            mean = mean[:, None]
        if RELOAD:
            w = _load_weight(weight, column, in_row, HAS_WEIGHT, OFFSET, WIDE)[None, :]
        normalised = _standardised(wide, mean, r, CENTRED)
        if NEEDS_DWEIGHT:
            terms = _weight_terms(dy_tile, normalised, dtype, LLAMA)
            if FOLD:
                terms = tl.sum(terms, axis=0)[None, :]
            sums += terms
            if CENTRED:
                bias_sums += tl.sum(dy_tile, axis=0)[None, :] if FOLD else dy_tile
        g = _gradient_of_normalised(dy_tile, w, dtype, LLAMA, HAS_WEIGHT)
        along = tl.sum(g * normalised, axis=1)[:, None] / columns
        if CENTRED:
            g -= tl.sum(g, axis=1)[:, None] / columns
        out = (g - normalised * along) * r
        if HAS_DS:
            ds_row = ds + _row_offsets(row, ds_inner, ds_outer_stride, ds_inner_stride)
            out += tl.load(ds_row[:, None] + column[None, :], mask=inside, other=0.0).to(WIDE)
        offsets = (row.to(tl.int64) * columns)[:, None] + column[None, :]
        tl.store(dx + offsets, _narrow(out, dx.dtype.element_ty), mask=inside)
        if HAS_DRESIDUAL:
            tl.store(dresidual + offsets, out, mask=inside)
    if NEEDS_DWEIGHT:
        partial = partials + tl.program_id(0).to(tl.int64) * (columns * (2 if CENTRED else 1)) + column
        tl.store(partial, tl.sum(sums, axis=0), mask=in_row)
        if CENTRED:
            tl.store(partial + columns, tl.sum(bias_sums, axis=0), mask=in_row)


@triton.jit
def _norm_row_scalars(
    dy, s, weight, rstd, along, columns,
    dy_inner, dy_outer_stride, dy_inner_stride, s_inner, s_outer_stride, s_inner_stride,
    OFFSET: tl.constexpr, LLAMA: tl.constexpr, HAS_WEIGHT: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    s_row = s + _row_offsets(row, s_inner, s_outer_stride, s_inner_stride)
    dy_row = dy + _row_offsets(row, dy_inner, dy_outer_stride, dy_inner_stride)
    mean, r = _moments(rstd, row, None, CENTRED, WIDE)
    products = tl.zeros((COLUMNS,), WIDE)
    gradients = tl.zeros((COLUMNS if CENTRED else 1,), WIDE)
    for first in tl.range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < columns
        dy_block = tl.load(dy_row + column, mask=inside, other=0.0).to(WIDE)
        w = _load_weight(weight, column, inside, HAS_WEIGHT, OFFSET, WIDE)
        g = _gradient_of_normalised(dy_block, w, s.dtype.element_ty, LLAMA, HAS_WEIGHT)
        products += g * _standardised(tl.load(s_row + column, mask=inside, other=0.0).to(WIDE), mean, r, CENTRED)
        if CENTRED:
            gradients += g
    tl.store(along + row, tl.sum(products, axis=0) / columns)
    if CENTRED:
        tl.store(along + tl.num_programs(0) + row, tl.sum(gradients, axis=0) / columns)


@triton.jit
def _norm_backward_wide(
    dy, ds, s, weight, rstd, along, dx, dresidual, partials, row_count, columns,
    dy_inner, dy_outer_stride, dy_inner_stride, ds_inner, ds_outer_stride, ds_inner_stride,
    s_inner, s_outer_stride, s_inner_stride,
    OFFSET: tl.constexpr, LLAMA: tl.constexpr, HAS_DS: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    CENTRED: tl.constexpr, HAS_DRESIDUAL: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = s.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    w = _load_weight(weight, column, inside, HAS_WEIGHT, OFFSET, WIDE)
    sums = tl.zeros((COLUMNS,), WIDE)
    bias_sums = tl.zeros((COLUMNS if CENTRED else 1,), WIDE)
    for index in tl.range(tl.program_id(1), row_count, tl.num_programs(1), num_stages=STAGES):
        # Starts at the last row, which _norm_row_scalars read last and which may still be in the cache.
        row = row_count - 1 - index
        s_row = s + _row_offsets(row, s_inner, s_outer_stride, s_inner_stride)
        dy_row = dy + _row_offsets(row, dy_inner, dy_outer_stride, dy_inner_stride)
        dy_block = tl.load(dy_row + column, mask=inside, other=0.0).to(WIDE)
        mean, r = _moments(rstd, row, None, CENTRED, WIDE)
        normalised = _standardised(tl.load(s_row + column, mask=inside, other=0.0).to(WIDE), mean, r, CENTRED)
        if NEEDS_DWEIGHT:
            sums += _weight_terms(dy_block, normalised, dtype, LLAMA)
            if CENTRED:
                bias_sums += dy_block
        g = _gradient_of_normalised(dy_block, w, dtype, LLAMA, HAS_WEIGHT)
        if CENTRED:
            g -= tl.load(along + row_count + row)
        out = (g - normalised * tl.load(along + row)) * r
        if HAS_DS:
            ds_row = ds + _row_offsets(row, ds_inner, ds_outer_stride, ds_inner_stride)
            out += tl.load(ds_row + column, mask=inside, other=0.0).to(WIDE)
        offsets = tl.cast(row, tl.int64) * columns + column
        tl.store(dx + offsets, _narrow(out, dx.dtype.element_ty), mask=inside)
        if HAS_DRESIDUAL:
            tl.store(dresidual + offsets, out, mask=inside)
    if NEEDS_DWEIGHT:
        partial = partials + tl.program_id(1).to(tl.int64) * (columns * (2 if CENTRED else 1)) + column
        tl.store(partial, sums, mask=inside)
        if CENTRED:
            tl.store(partial + columns, bias_sums, mask=inside)


@triton.jit
def _norm_add_partials(
    partials, dweight, count, columns, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    sums = tl.zeros((ROWS, COLUMNS), WIDE)
    for first in tl.range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        offsets = row.to(tl.int64)[:, None] * columns + column[None, :]
        sums += tl.load(partials + offsets, mask=(row < count)[:, None] & inside[None, :], other=0.0)
    tl.store(dweight + column, _narrow(tl.sum(sums, axis=0), dweight.dtype.element_ty), mask=inside)


# ---- the entry points: rmsnorm_fused.ops.rows has the shapes of their arguments. Every sum has a fixed order, so
# `deterministic` changes nothing.


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Y (M, N), s (M, N) if there is a residual, and rstd (M,) of each row, or mean and rstd (M, 2) if centred."""
    rows, columns = x.shape[0] * x.shape[1], x.shape[2]
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    kept = torch.empty((rows, 2) if options.centred else (rows,), dtype=wide_dtype(x.dtype), device=x.device)
    s = _launch_forward(x, residual, weight, options, y, bias=bias, kept=kept)
    return y, s, kept


def quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    options: Options,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Y / scale (M, N) rounded to float8, s (M, N) if there is a residual, and scales (M,) if none is given."""
    rows, columns = x.shape[0] * x.shape[1], x.shape[2]
    y = torch.empty((rows, columns), dtype=torch.uint8, device=x.device)
    row_scales = None if scale is not None else torch.empty((rows,), dtype=torch.float32, device=x.device)
    s = _launch_forward(x, residual, weight, options, y, scale=scale, row_scales=row_scales)
    return y.view(dtype), s, row_scales


def _launch_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    options: Options,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Fill y and those of kept and row_scales that are given; return s."""
    rows, columns = y.shape
    s = None if residual is None else torch.empty((rows, columns), dtype=residual.dtype, device=x.device)
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    wide = wide_dtype(x.dtype)
    tensors = (x, residual, weight, bias, scale, y, s, kept, row_scales)
    layouts = (*_layout(x), *_layout(residual))
    # eps is a constexpr: as an argument it would be rounded to float32, even for float64 tensors.
    constants = {
        "EPS": options.eps,
        "OFFSET": options.weight_offset,
        "LLAMA": options.llama,
        "HAS_RESIDUAL": residual is not None,
        "HAS_WEIGHT": weight is not None,
        "CENTRED": options.centred,
        "HAS_BIAS": bias is not None,
        "FLOAT8": "" if kept is not None else "static" if scale is not None else "dynamic",
        "FLOAT8_HARDWARE": _converts_to_float8(x.device),
        "WIDE": _triton_dtype(wide),
    }
    tiling = forward_tiling(columns, wide.itemsize)
    with _on(x.device):
        if tiling.columns < columns:
            launch(
                _norm_forward_wide, (_smaller(rows, _programs(x.device, tiling)),),
                *tensors, rows, columns, *layouts, **constants,
                COLUMNS=tiling.columns, STAGES=_stages(tiling, (x, residual)), num_warps=tiling.warps,
            )  # fmt: skip
        else:
            launch(
                _norm_forward, (_tiles(rows, tiling.rows),),
                *tensors, rows, columns, *layouts, **constants, **_tile(tiling, rows, columns), num_warps=tiling.warps,
                EVICT=_eviction_policy(x),
            )  # fmt: skip
    return s


def backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    kept: torch.Tensor,
    weight_offset: float,
    llama: bool,
    centred: bool,
    needs_dparameters: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Dx (M, N), dresidual (M, N) if s is wider than dy, and dweight (N,), or dweight and dbias (2, N), if requested.

    Dx and dresidual are the same gradient in the dtypes of dy and s. One pass writes both, because a copy in another
    dtype would read it again.
    """
    read = (dy, ds, s)
    rows, columns = s.shape[0] * s.shape[1], s.shape[-1]
    dx = torch.empty((rows, columns), dtype=dy.dtype, device=s.device)
    dresidual = None if dy.dtype == s.dtype else torch.empty_like(dx, dtype=s.dtype)
    weight = None if weight is None else weight.contiguous()
    needs_dparameters = needs_dparameters and (centred or weight is not None)
    constants = {
        "OFFSET": weight_offset,
        "LLAMA": llama,
        "HAS_DS": ds is not None,
        "HAS_WEIGHT": weight is not None,
        "CENTRED": centred,
        "HAS_DRESIDUAL": dresidual is not None,
        "NEEDS_DWEIGHT": needs_dparameters,
        "WIDE": _triton_dtype(kept.dtype),
    }
    tiling = backward_tiling(columns, kept.element_size())
    run = _launch_backward_wide if tiling.columns < columns else _launch_backward
    with _on(s.device):
        partials = run(tiling, read, weight, kept, (dx, dresidual), constants)
        if not needs_dparameters:
            return dx, dresidual, None
        dparameters = torch.empty(
            (2, columns) if centred else (columns,), dtype=(kept if weight is None else weight).dtype, device=s.device
        )
        tiling = sum_tiling(columns)
        launch(
            _norm_add_partials, (_tiles(dparameters.numel(), tiling.columns),),
            partials, dparameters, partials.shape[0], dparameters.numel(),
            WIDE=constants["WIDE"], ROWS=tiling.rows, COLUMNS=tiling.columns, num_warps=tiling.warps,
        )  # fmt: skip
    return dx, dresidual, dparameters


def _launch_backward(
    tiling: Tiling,
    read: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    written: tuple[torch.Tensor, torch.Tensor | None],
    constants: dict[str, Any],
) -> torch.Tensor:
    """Fill ``written``, dx and dresidual, from ``read``, dy, ds and s; return the partial rows of dweight."""
    dx = written[0]
    rows, columns = dx.shape
    count = _smaller(_tiles(rows, tiling.rows), _programs(dx.device, tiling))
    partials = _partials(count, columns, rstd, constants)
    layouts = (number for tensor in read for number in _layout(tensor))
    launch(
        _norm_backward, (count,),
        *read, weight, rstd, *written, partials, rows, columns, *layouts, **constants, **_tile(tiling, rows, columns),
        STAGES=_stages(tiling, (*read, weight if tiling.reload else None), rstd), RELOAD=tiling.reload,
        FOLD=_rows_share_threads(tiling, dx), num_warps=tiling.warps,
    )  # fmt: skip
    return partials


def _launch_backward_wide(
    tiling: Tiling,
    read: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    written: tuple[torch.Tensor, torch.Tensor | None],
    constants: dict[str, Any],
) -> torch.Tensor:
    """The same as :func:`_launch_backward`, for rows that do not fit in a program."""
    dx = written[0]
    rows, columns = dx.shape
    dy, _, s = read
    along = torch.empty_like(rstd)  # with the mean of g for each row after it if centred
    shared = {key: constants[key] for key in ("OFFSET", "LLAMA", "HAS_WEIGHT", "CENTRED", "WIDE")}
    launch(
        _norm_row_scalars, (rows,),
        dy, s, weight, rstd, along, columns, *_layout(dy), *_layout(s), **shared, COLUMNS=_TILE, num_warps=8,
    )  # fmt: skip
    blocks = _tiles(columns, tiling.columns)
    count = _smaller(rows, _tiles(_programs(dx.device, tiling), blocks))
    partials = _partials(count, columns, rstd, constants)
    layouts = (number for tensor in read for number in _layout(tensor))
    launch(
        _norm_backward_wide, (blocks, count),
        *read, weight, rstd, along, *written, partials, rows, columns, *layouts, **constants,
        COLUMNS=tiling.columns, STAGES=_stages(tiling, read, rstd), num_warps=tiling.warps,
    )  # fmt: skip
    return partials


def _partials(count: int, columns: int, rstd: torch.Tensor, constants: dict[str, Any]) -> torch.Tensor:
    shape = (count if constants["NEEDS_DWEIGHT"] else 0, columns * (2 if constants["CENTRED"] else 1))
    return torch.empty(shape, dtype=rstd.dtype, device=rstd.device)


def _tile(tiling: Tiling, rows: int, columns: int) -> dict[str, Any]:
    """The tile's constants for a kernel that takes whole rows."""
    index = tl.int64 if rows > 2**31 - tiling.rows else tl.int32
    return {"ROWS": tiling.rows, "COLUMNS": tiling.columns, "EXACT": tiling.columns == columns, "INDEX": index}


def _stages(tiling: Tiling, read: tuple[torch.Tensor | None, ...], rstd: torch.Tensor | None = None) -> int:
    """Stages of a loop that reads rows of tensors and one element of rstd per row."""
    tensors = [tensor for tensor in read if tensor is not None]
    bytes_a_row = sum(tiling.columns * tensor.element_size() for tensor in tensors) + (
        0 if rstd is None else rstd.element_size()
    )
    return tiling.stages_within(bytes_a_row, _shared_memory(tensors[0].device.index)) if tensors[0].is_cuda else 1


def _rows_share_threads(tiling: Tiling, tensor: torch.Tensor) -> bool:
    """Whether Triton assigns the rows of a tile to the same threads: if one row occupies all threads."""
    return tiling.columns >= tiling.warps * 32 * (16 // tensor.element_size())


def _layout(rows: torch.Tensor | None) -> tuple[int, int, int]:
    """The inner size, outer stride and inner stride of (outer, inner, N).

    Rows at one stride are described by an inner size of 1, for which Triton compiles a kernel without a division.
    """
    if rows is None:
        return 1, 0, 0
    outer, inner, _ = rows.shape
    if outer == 1 or inner == 1:
        return 1, rows.stride(1 if outer == 1 else 0), 0
    return inner, rows.stride(0), rows.stride(1)


def _triton_dtype(dtype: torch.dtype) -> object:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _programs(device: torch.device, tiling: Tiling) -> int:
    """The number of persistent programs of a kernel on a device."""
    if device.type == "cpu":
        return 3  # the interpreter runs them one after another; several, so that partial rows are added
    return int(_properties(device.index).multi_processor_count * tiling.programs)


def _converts_to_float8(device: torch.device) -> bool:
    """Whether the GPU has an instruction for this conversion (sm_89 and later)."""
    if device.type != "cuda" or interpreted():
        return False
    properties = _properties(device.index)
    return (properties.major, properties.minor) >= (8, 9)


@functools.cache
def _properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def _eviction_policy(x: torch.Tensor) -> str:
    """The L2 eviction policy for reads of x and of a residual, which happen once.

    If x does not fit in the cache, a pass that reads x and writes y is 4 % faster on an H200 when the lines of y are
    evicted before those of x (NOTES.md).
    """
    if x.device.type != "cuda":
        return ""
    return "evict_last" if x.numel() * x.element_size() > _properties(x.device.index).L2_cache_size else ""


def _shared_memory(index: int) -> int:
    """The largest amount of shared memory that a program can use, in bytes."""
    return int(_properties(index).shared_memory_per_block_optin)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current device, on which Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
