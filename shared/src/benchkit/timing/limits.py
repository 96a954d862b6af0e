"""Limits of a machine: measured memory bandwidth and matrix-product rates, and the vendor's datasheet.

The time of a memory-bound kernel is at least its bytes divided by the copy bandwidth for the same mix of reads and
writes. The limit of a matrix product is the rate of the best library product of the same dtype, or of float32 where
that is faster than the 16-bit dtype's. Both are measured in the run that they are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from benchkit.results import Quantity, Record, Results
from benchkit.timing.clocks import Inputs
from benchkit.timing.comparison import compare, last_level_cache, measure, rotating_inputs
from benchkit.timing.vector_copies import vector_copies

if TYPE_CHECKING:
    import torch

    from benchkit.device import Device

Traffic = Literal["1 read 1 write", "2 reads 1 write", "2 reads 2 writes"]


@dataclass(frozen=True)
class Datasheet:
    """The vendor's dense peak rates for one GPU.

    Attributes:
        bandwidth: Bandwidth of the device memory, bytes per second.
        flops: Operations per second by torch dtype name; ``"tf32"`` is float32 on the tensor cores.
        source: Title of the datasheet.
    """

    bandwidth: float
    flops: dict[str, float]
    source: str


# The keys are the complete names that the driver reports: an H200 NVL, a GH200 and a MIG slice have other rates. The
# rates are dense, which is half of those stated "with sparsity".
_DATASHEETS = {
    "NVIDIA H200": Datasheet(
        4.8e12,
        {"bfloat16": 989.5e12, "float16": 989.5e12, "tf32": 494.5e12, "float32": 67e12, "float64": 67e12},
        "NVIDIA H200 Tensor Core GPU datasheet (SXM)",
    ),
    "NVIDIA H100 80GB HBM3": Datasheet(
        3.35e12,
        {"bfloat16": 989.5e12, "float16": 989.5e12, "tf32": 494.5e12, "float32": 67e12, "float64": 67e12},
        "NVIDIA H100 Tensor Core GPU datasheet (SXM)",
    ),
    "NVIDIA A100-SXM4-80GB": Datasheet(
        2.039e12,
        {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12, "float64": 19.5e12},
        "NVIDIA A100 Tensor Core GPU datasheet (SXM 80GB)",
    ),
}


def datasheet(gpu_name: str) -> Datasheet | None:
    """The datasheet of a GPU by the name that the driver reports; None for an unknown GPU."""
    return _DATASHEETS.get(gpu_name)


def fraction_of_limit(bytes_moved: float, seconds: float, bytes_per_second: float) -> float:
    """The share of a measured bandwidth that a kernel reached: (bytes_moved / seconds) / bytes_per_second.

    Args:
        bytes_moved: Bytes that the operation must at least read and write.
        seconds: Time of the kernel.
        bytes_per_second: The limit for the same mix of reads and writes, from :func:`memory_limits`.
    """
    return bytes_moved / seconds / bytes_per_second


def memory_limits(device: Device, *, bytes_per_tensor: int | None = None, seconds: float = 0.5) -> Iterator[Record]:
    """Measure the bandwidth of a memory that is far larger than the caches: the limit of a memory-bound kernel.

    The records are called ``memory limit``, with the label ``traffic``. The bytes of an operand are counted once for
    each read and once for each write that the operation needs. On a CPU, an ordinary store reads the line that it
    writes into the cache first (write-allocate), which is not counted: by ordinary stores, a copy moves half as much
    again as it counts. So each kind of traffic is measured with ordinary stores (PyTorch's operators) and with
    streaming stores, which avoid that read, and the limit is the faster of the two.

    Args:
        device: The device to measure.
        bytes_per_tensor: Size of each operand; by default 256 MiB on a GPU, and on a CPU four times the last-level
            cache, but at least 64 MiB.
        seconds: How long to sample each kind of traffic.

    Yields:
        One record for 1 read 1 write (``copy_``), one for 2 reads 1 write (``add``) and, on a GPU, one for 2 reads
        2 writes (a Triton kernel, because PyTorch has no operator with that traffic). The values are ``bandwidth``
        (B/s) and ``tensor`` (B); on a CPU also ``cache`` (B), the size of the last-level cache, and, where a C compiler
        makes streaming stores possible, ``ordinary`` (B/s), the bandwidth by ordinary stores.
    """
    import torch

    # Larger tensors are no better on a GPU: in a CUDA graph, a copy of 1 GiB ran at two thirds of the rate of 256 MiB
    # (H200, driver 580, 2026-11-20). Without a graph both ran at the same rate.
    size = bytes_per_tensor or (256 << 20 if device == "cuda" else max(4 * last_level_cache(), 64 << 20))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def tensors(number: int) -> Callable[[], tuple[torch.Tensor, ...]]:
        return lambda: tuple(torch.rand(size // dtype.itemsize, device=device).to(dtype) for _ in range(number))

    for traffic, operands, ways in _ways(device):
        inputs = rotating_inputs(tensors(operands), device=device)
        timings = compare(ways, device=device, inputs=inputs, seconds=seconds)
        rates = {way: timings[way].quantity().per(operands * size, "B/s") for way in ways}
        values = {"bandwidth": max(rates.values(), key=lambda rate: rate.value), "tensor": Quantity(size, "B")}
        if device == "cpu":
            values["cache"] = Quantity(last_level_cache(), "B")
            if len(rates) > 1:
                values["ordinary"] = rates["ordinary"]
        yield Record("memory limit", {"traffic": traffic}, values)


def _ways(device: Device) -> Iterator[tuple[Traffic, int, dict[str, Callable[..., Any]]]]:
    """Each kind of traffic, its number of operands, and the functions that move it into the last operand, by name."""
    import torch

    copy: dict[str, Callable[..., Any]] = {"ordinary": lambda x, out: out.copy_(x)}
    add: dict[str, Callable[..., Any]] = {"ordinary": lambda x, y, out: torch.add(x, y, out=out)}
    if device == "cpu" and (streaming := vector_copies("streaming")) is not None:
        copy["streaming"], add["streaming"] = streaming.copy, streaming.combine
    yield "1 read 1 write", 2, copy
    yield "2 reads 1 write", 3, add
    if device == "cuda":
        from benchkit.timing.stream_kernels import add_and_subtract

        yield "2 reads 2 writes", 4, {"ordinary": add_and_subtract}


def product_limits(device: Device, *, size: int | None = None, seconds: float = 0.5) -> Iterator[Record]:
    """Measure square matrix products of random operands; zeros switch fewer transistors and run faster than real data.

    The records are called ``product limit``, with the label ``dtype`` and the value ``rate`` (FLOP/s).

    Args:
        device: The device to measure.
        size: Rows and columns of the operands; by default 8192 on a GPU and 1024 on a CPU.
        seconds: How long to sample each dtype.

    Yields:
        One record each for float32 and bfloat16, and on a GPU for float16 and tf32.
    """
    import torch

    n = size or (8192 if device == "cuda" else 1024)
    names = ("bfloat16", "float16", "tf32", "float32") if device == "cuda" else ("float32", "bfloat16")
    for name in names:
        dtype = torch.float32 if name == "tf32" else getattr(torch, name)
        inputs: Inputs = [tuple(torch.randn(n, n, device=device).to(dtype) for _ in range(2))]
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        try:
            timing = measure(torch.mm, device=device, inputs=inputs, seconds=seconds)
        finally:
            torch.set_float32_matmul_precision(precision)
        yield Record("product limit", {"dtype": name, "size": n}, {"rate": timing.quantity().per(2 * n**3, "FLOP/s")})


def product_ceiling(results: Results, dtype: str) -> Record | None:
    """The ``product limit`` of a dtype's products: its own or, for 16 bits, float32's where that is faster.

    Widening a 16-bit operand to float32 is exact, and costs little beside a product. Where the library emulates 16-bit
    products, their rate, a hundredth of float32's, limits nothing.

    Args:
        results: A run with the records of :func:`product_limits`.
        dtype: Name of the operands' dtype.

    Returns:
        The record, whose label ``dtype`` says which products they are; None if those of ``dtype`` were not measured.
    """
    rates = {str(record.labels["dtype"]): record for record in results.select("product limit")}
    if dtype not in rates:
        return None
    wider = ["float32"] if dtype in ("bfloat16", "float16") and "float32" in rates else []
    return max((rates[name] for name in (dtype, *wider)), key=lambda record: record["rate"].value)
