"""RMSNorm in Triton: forward, and backward with a deterministic dweight.

Rows of up to ``_WHOLE_ROW`` columns lie in the registers of one program, several narrow rows side by side. Forward
reads x once. Backward is persistent: each program walks over every P-th tile of rows, keeps its own float32 sum for
dweight, and writes it as one partial row at the end; a second kernel adds the partial rows in a fixed order.

Wider rows are walked through in blocks: forward reads x a second time (mostly from the L2 cache); backward finds each
row's scalar with one kernel, and dx and dweight with a second one that owns columns.

Shapes: x and dy (outer, inner, N) with adjacent columns, row r at [r // inner, r % inner]; y and dx (M, N) contiguous.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_WHOLE_ROW = 8192  # columns; backward holds x, dy, weight and the sums of 8 columns in the 64 registers of a thread
_TILE = 4096  # elements that one program works on at a time where rows are narrower than this
_WIDE_BLOCK = 4096  # columns at a time of a row that is wider than _WHOLE_ROW
_COLUMNS = 64  # columns of one program of the kernel that adds partial rows
_FORWARD_ELEMENTS = 16  # of a tile a thread: two 16-byte loads of bfloat16
_BACKWARD_ELEMENTS = 8
_WARPS_A_MULTIPROCESSOR = 32  # persistent; 64 registers a thread
_RING_BYTES = 65536  # of shared memory for the tiles of x and dy on their way; every GPU from sm_80 on has it


def unavailable(device_type: str) -> str | None:
    """Why these kernels cannot run on such a device, with the remedy; None where they can.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    if device_type == "cuda" or interpreted():
        return None
    return "Triton runs on a CPU only under its interpreter (set TRITON_INTERPRET=1 before Python starts; slow)"


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels; Triton itself reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut up.

    Attributes:
        rows: side by side in one program.
        columns: at a time, a power of two.
        warps: of a program.
    """

    rows: int
    columns: int
    warps: int

    @staticmethod
    def of(columns: int, elements_a_thread: int) -> Tile:
        """The tile for rows of that many columns, at most _WHOLE_ROW."""
        width = triton.next_power_of_2(columns)
        rows = max(_TILE // width, 1)
        return Tile(rows, width, rows * width // elements_a_thread // 32)

    def stages(self, element_size: int) -> int:
        """Iterations of the backward loop in flight: the current one and as many as the ring holds, at most three."""
        return 1 + min(_RING_BYTES // (2 * self.rows * self.columns * element_size), 3)


@triton.jit
def _row_offsets(rows, inner, outer_stride, inner_stride):
    # 64 bits: a tensor may hold more than 2^31 elements.
    return (rows // inner).to(tl.int64) * outer_stride + (rows % inner).to(tl.int64) * inner_stride


@triton.jit
def _forward(
    x, weight, y, rstd, row_count, columns, inner, outer_stride, inner_stride,
    EPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < row_count)[:, None] & (column < columns)[None, :]
    x_row = x + _row_offsets(row, inner, outer_stride, inner_stride)
    x_tile = tl.load(x_row[:, None] + column[None, :], mask=inside, other=0.0).to(WIDE)
    if HAS_WEIGHT:
        w = tl.load(weight + column, mask=column < columns, other=0.0).to(WIDE)
    scale = 1.0 / tl.sqrt(tl.sum(x_tile * x_tile, axis=1) / columns + EPS)
    tl.store(rstd + row, scale, mask=row < row_count)
    out = x_tile * scale[:, None]
    if HAS_WEIGHT:
        out = out * w[None, :]
    y_row = y + row.to(tl.int64) * columns
    tl.store(y_row[:, None] + column[None, :], out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _forward_wide(
    x, weight, y, rstd, columns, inner, outer_stride, inner_stride,
    EPS: tl.constexpr, HAS_WEIGHT: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x_row = x + _row_offsets(row, inner, outer_stride, inner_stride)
    y_row = y + row.to(tl.int64) * columns
    squares = tl.zeros((COLUMNS,), WIDE)
    for first in tl.range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        # Kept in the L2 cache for the second reading.
        block = tl.load(x_row + column, mask=column < columns, other=0.0, eviction_policy="evict_last").to(WIDE)
        squares += block * block
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / columns + EPS)
    tl.store(rstd + row, scale)
    for first in tl.range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < columns
        out = tl.load(x_row + column, mask=inside, other=0.0, eviction_policy="evict_first").to(WIDE) * scale
        if HAS_WEIGHT:
            out = out * tl.load(weight + column, mask=inside, other=0.0).to(WIDE)
        tl.store(y_row + column, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy, x, weight, rstd, dx, partials, row_count, columns,
    dy_inner, dy_outer_stride, dy_inner_stride, x_inner, x_outer_stride, x_inner_stride,
    HAS_WEIGHT: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    in_row = column < columns
    if HAS_WEIGHT:
        w = tl.load(weight + column, mask=in_row, other=0.0).to(WIDE)
    sums = tl.zeros((ROWS, COLUMNS), WIDE)
    tiles = tl.cdiv(row_count, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < row_count)[:, None] & in_row[None, :]
        x_row = x + _row_offsets(row, x_inner, x_outer_stride, x_inner_stride)
        dy_row = dy + _row_offsets(row, dy_inner, dy_outer_stride, dy_inner_stride)
        x_tile = tl.load(x_row[:, None] + column[None, :], mask=inside, other=0.0).to(WIDE)
        dy_tile = tl.load(dy_row[:, None] + column[None, :], mask=inside, other=0.0).to(WIDE)
        scale = tl.load(rstd + row, mask=row < row_count, other=0.0)[:, None]
        normalised = x_tile * scale
        g = dy_tile
        if HAS_WEIGHT:
            g = dy_tile * w[None, :]
        along_x = tl.sum(g * normalised, axis=1)[:, None] / columns
        out = (g - normalised * along_x) * scale
        dx_row = dx + row.to(tl.int64) * columns
        tl.store(dx_row[:, None] + column[None, :], out.to(dx.dtype.element_ty), mask=inside)
        if NEEDS_DWEIGHT:
            sums += dy_tile * normalised
    if NEEDS_DWEIGHT:
        partial = partials + tl.program_id(0).to(tl.int64) * columns
        tl.store(partial + column, tl.sum(sums, axis=0), mask=in_row)


@triton.jit
def _row_scalars(
    dy, x, weight, rstd, along, columns,
    dy_inner, dy_outer_stride, dy_inner_stride, x_inner, x_outer_stride, x_inner_stride,
    HAS_WEIGHT: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x_row = x + _row_offsets(row, x_inner, x_outer_stride, x_inner_stride)
    dy_row = dy + _row_offsets(row, dy_inner, dy_outer_stride, dy_inner_stride)
    products = tl.zeros((COLUMNS,), WIDE)
    for first in tl.range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < columns
        g = tl.load(dy_row + column, mask=inside, other=0.0).to(WIDE)
        if HAS_WEIGHT:
            g = g * tl.load(weight + column, mask=inside, other=0.0).to(WIDE)
        products += g * tl.load(x_row + column, mask=inside, other=0.0).to(WIDE)
    tl.store(along + row, tl.sum(products, axis=0) * tl.load(rstd + row) / columns)


@triton.jit
def _backward_wide(
    dy, x, weight, rstd, along, dx, partials, row_count, columns,
    dy_inner, dy_outer_stride, dy_inner_stride, x_inner, x_outer_stride, x_inner_stride,
    HAS_WEIGHT: tl.constexpr, NEEDS_DWEIGHT: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    if HAS_WEIGHT:
        w = tl.load(weight + column, mask=inside, other=0.0).to(WIDE)
    sums = tl.zeros((COLUMNS,), WIDE)
    for row in tl.range(tl.program_id(1), row_count, tl.num_programs(1), num_stages=STAGES):
        x_row = x + _row_offsets(row, x_inner, x_outer_stride, x_inner_stride)
        dy_row = dy + _row_offsets(row, dy_inner, dy_outer_stride, dy_inner_stride)
        dy_block = tl.load(dy_row + column, mask=inside, other=0.0).to(WIDE)
        scale = tl.load(rstd + row)
        normalised = tl.load(x_row + column, mask=inside, other=0.0).to(WIDE) * scale
        g = dy_block
        if HAS_WEIGHT:
            g = dy_block * w
        out = (g - normalised * tl.load(along + row)) * scale
        tl.store(dx + tl.cast(row, tl.int64) * columns + column, out.to(dx.dtype.element_ty), mask=inside)
        if NEEDS_DWEIGHT:
            sums += dy_block * normalised
    if NEEDS_DWEIGHT:
        tl.store(partials + tl.program_id(1).to(tl.int64) * columns + column, sums, mask=inside)


@triton.jit
def _add_partials(partials, dweight, count, columns, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    sums = tl.zeros((ROWS, COLUMNS), WIDE)
    for first in tl.range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        offsets = row.to(tl.int64)[:, None] * columns + column[None, :]
        sums += tl.load(partials + offsets, mask=(row < count)[:, None] & inside[None, :], other=0.0)
    tl.store(dweight + column, tl.sum(sums, axis=0).to(dweight.dtype.element_ty), mask=inside)


def forward(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Y (M, N) and rstd (M,) of the rows of x (outer, inner, N)."""
    outer, inner, columns = x.shape
    rows = outer * inner
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    rstd = torch.empty((rows,), dtype=wide, device=x.device)
    weight = None if weight is None else weight.contiguous()
    # eps is a constant of the kernel: as an argument it would be rounded to float32, also for float64 tensors.
    constants = {"EPS": eps, "HAS_WEIGHT": weight is not None, "WIDE": _triton_dtype(wide)}
    layout = _layout(x)
    with _on(x.device):
        if columns > _WHOLE_ROW:
            _forward_wide[(rows,)](x, weight, y, rstd, columns, *layout, **constants, COLUMNS=_WIDE_BLOCK, num_warps=8)
        else:
            tile = Tile.of(columns, _FORWARD_ELEMENTS)
            _forward[(triton.cdiv(rows, tile.rows),)](
                x, weight, y, rstd, rows, columns, *layout, **constants,
                ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
            )  # fmt: skip
    return y, rstd


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, needs_dweight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Dx (M, N) and, where it is asked for, dweight (N,), for the rows of dy and x (outer, inner, N)."""
    rows, columns = rstd.numel(), x.shape[-1]
    dx = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    weight = None if weight is None else weight.contiguous()
    constants = {
        "HAS_WEIGHT": weight is not None,
        "NEEDS_DWEIGHT": needs_dweight,
        "WIDE": _triton_dtype(rstd.dtype),
    }
    layout = (*_layout(dy), *_layout(x))
    with _on(x.device):
        if columns > _WHOLE_ROW:
            partials = _run_backward_wide(dy, x, weight, rstd, dx, layout, constants)
        else:
            tile = Tile.of(columns, _BACKWARD_ELEMENTS)
            count = min(triton.cdiv(rows, tile.rows), _programs(x.device, tile.warps))
            partials = _partials(count, columns, rstd, needs_dweight)
            _backward[(count,)](
                dy, x, weight, rstd, dx, partials, rows, columns, *layout, **constants,
                ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages(x.element_size()), num_warps=tile.warps,
            )  # fmt: skip
        if not needs_dweight or weight is None:
            return dx, None
        dweight = torch.empty_like(weight)
        _add_partials[(triton.cdiv(columns, _COLUMNS),)](
            partials,
            dweight,
            partials.shape[0],
            columns,
            WIDE=constants["WIDE"],
            ROWS=32,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    return dx, dweight


def _run_backward_wide(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    layout: tuple[int, ...],
    constants: dict[str, object],
) -> torch.Tensor:
    """Fill dx; return the partial rows of dweight."""
    rows, columns = dx.shape
    along = torch.empty_like(rstd)
    shared = {key: constants[key] for key in ("HAS_WEIGHT", "WIDE")}
    _row_scalars[(rows,)](dy, x, weight, rstd, along, columns, *layout, **shared, COLUMNS=_WIDE_BLOCK, num_warps=8)
    tile = Tile(rows=1, columns=_WIDE_BLOCK // 2, warps=4)
    blocks = triton.cdiv(columns, tile.columns)
    count = min(rows, triton.cdiv(_programs(x.device, tile.warps), blocks))
    partials = _partials(count, columns, rstd, bool(constants["NEEDS_DWEIGHT"]))
    _backward_wide[(blocks, count)](
        dy, x, weight, rstd, along, dx, partials, rows, columns, *layout, **constants,
        COLUMNS=tile.columns, STAGES=tile.stages(x.element_size()), num_warps=tile.warps,
    )  # fmt: skip
    return partials


def _partials(count: int, columns: int, rstd: torch.Tensor, wanted: bool) -> torch.Tensor:
    return torch.empty((count, columns) if wanted else (0, columns), dtype=rstd.dtype, device=rstd.device)


def _layout(rows: torch.Tensor) -> tuple[int, int, int]:
    """inner, outer stride and inner stride of (outer, inner, N)."""
    return rows.shape[1], rows.stride(0), rows.stride(1)


def _triton_dtype(dtype: torch.dtype) -> object:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _programs(device: torch.device, warps: int) -> int:
    """Persistent programs that fill a device."""
    if device.type == "cpu":
        return 3  # the interpreter runs them one after the other; more than one, so that partial rows are added
    return _multiprocessors(device.index) * max(_WARPS_A_MULTIPROCESSOR // warps, 1)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _on(device: torch.device) -> torch.cuda.device:
    """Triton launches on the current device; an index of -1 leaves it as it is."""
    return torch.cuda.device(device.index if device.type == "cuda" else -1)
