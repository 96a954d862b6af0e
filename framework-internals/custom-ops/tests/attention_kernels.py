"""The attention kernels alone: built without a torch binding and called through ctypes.

The tests need what the operator does not offer: every kernel by name, on a GPU, or on a CPU with
``csrc/flash_attention/cuda/device/emulator.h``, which emulates the tensor cores thread by thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock

from custom_ops.builds.operator_library import attention_levels
from native_build import INCLUDE_DIR, BuildError, build_root, find_nvcc

SOURCES = Path(__file__).parents[1] / "csrc" / "flash_attention"
KERNEL_FILES = tuple(path.relative_to(SOURCES).as_posix() for path in sorted(SOURCES.rglob("*.cu")))

Machine = Literal["cpu", "tiles", "amx", "emulator", "cuda"]

# Flags of the CPU implementation: plain C++, with emulated tiles of AMX, and with AMX.
_LEVELS = attention_levels()
CPU_FLAGS: dict[Machine, tuple[str, ...]] = {"cpu": ()}
if "amx" in _LEVELS:
    CPU_FLAGS |= {"tiles": (*_LEVELS["avx512_bf16"], "-DFLASH_ATTENTION_EMULATED_TILES"), "amx": _LEVELS["amx"]}


class Algorithm(Enum):
    """Selects the kernel; ``flash_attention.h`` says what each supports."""

    AUTO = 0
    NAIVE = 1
    MMA = 2
    WGMMA = 3


_SCALAR_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3)]


class _Features(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("window_left", "window_right")),
        ("softcap", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("sinks", "bias")),
        ("bias_strides", ctypes.c_int64 * 4),
        ("alibi_slopes", ctypes.c_void_p),
        ("alibi_batch_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens_q", "cu_seqlens_k")),
        ("sequences", ctypes.c_int64),
    ]


class _Problem(ctypes.Structure):
    _fields_ = [
        ("dtype", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_size")),
        ("scale", ctypes.c_double),
        ("causal", ctypes.c_bool),
        ("algorithm", ctypes.c_int),
        ("features", _Features),
    ]


class _Forward(ctypes.Structure):
    _fields_ = [
        ("problem", _Problem),
        *((name, _Tensor) for name in ("q", "k", "v", "out")),
        ("lse", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
    ]


class _Backward(ctypes.Structure):
    _fields_ = [
        ("problem", _Problem),
        *((name, _Tensor) for name in ("q", "k", "v", "out", "grad_out")),
        ("lse", ctypes.c_void_p),
        ("grad_lse", ctypes.c_void_p),
        *((name, _Tensor) for name in ("dq", "dk", "dv")),
        ("workspace", ctypes.c_void_p),
        ("deterministic", ctypes.c_bool),
        ("bias_gradient", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Features:
    """What a call has beside a causal mask, with the meaning of the operator's arguments.

    Attributes:
        window_left: Keys before the diagonal; -1 is no limit.
        window_right: Keys after it.
        softcap: Bound of the scores; 0 is none.
        sinks: (heads_q,), in the dtype of lse.
        bias: (batch, heads_q, seq_q, seq_kv), or 1 for any of these, in the operands' dtype.
        alibi_slopes: (heads_q,), in the dtype of lse.
        cu_seqlens_q: int32, where the sequences of queries start and the last one ends.
        cu_seqlens_k: Likewise for the keys.
    """

    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[object, ...]:
        """All of them, in the order of the operator."""
        return tuple(vars(self).values())

    def structure(self) -> _Features:
        """The struct that the kernels take."""
        pointers = {name: None if x is None else x.data_ptr() for name, x in vars(self).items() if name in _POINTERS}
        bias, starts = self.bias, self.cu_seqlens_q
        strides = [] if bias is None else [0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True)]
        return _Features(
            window_left=self.window_left, window_right=self.window_right, softcap=self.softcap, **pointers,
            bias_strides=(ctypes.c_int64 * 4)(*strides), sequences=0 if starts is None else len(starts) - 1,
        )  # fmt: skip


_POINTERS = ("sinks", "bias", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k")
PLAIN = Features()


@dataclass(frozen=True)
class Kernels:
    """The kernels for one kind of processor.

    Attributes:
        library: The loaded shared library.
        machine: Where the functions run: a key of :data:`CPU_FLAGS` (the CPU's own), ``"emulator"`` or ``"cuda"``.
    """

    library: ctypes.CDLL
    machine: Machine

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        algorithm: Algorithm = Algorithm.AUTO,
        features: Features = PLAIN,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute ``softmax(scale * q k^T) v`` and the log-sum-exp of each row, in tensors filled with NaN before.

        Args:
            q: (batch, heads_q, seq_q, head_size), unit stride in the last dimension.
            k: (batch, heads_kv, seq_kv, head_size).
            v: Same as ``k``.
            causal: Whether query i attends only to keys j ≤ i + seq_kv - seq_q.
            scale: Factor of the scores; ``head_size ** -0.5`` by default.
            algorithm: Which kernel to run. The CPU has one implementation and ignores this.
            features: What else changes or limits the scores.
            out: Tensor for the result; a new one by default.

        Raises:
            ValueError: If the kernels do not support the problem.
        """
        problem = _problem(q, k, causal, scale, algorithm, features)
        out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device) if out is None else out
        lse = torch.full(q.shape[:3], torch.nan, dtype=_lse_dtype(q), device=q.device)
        workspace = self._workspace("forward", problem, q)
        args = _Forward(problem, _tensor(q), _tensor(k), _tensor(v), _tensor(out), lse.data_ptr(), workspace.data_ptr())
        self._call("forward", args, q.device)
        return out, lse

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        *,
        grad_lse: torch.Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        algorithm: Algorithm = Algorithm.AUTO,
        deterministic: bool = False,
        features: Features = PLAIN,
        bias_gradient: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the gradients of q, k and v from the results of ``forward`` and their gradients.

        Args:
            q: Same as in ``forward``.
            k: Same as in ``forward``.
            v: Same as in ``forward``.
            out: Output that ``forward`` returned.
            lse: Log-sum-exp that ``forward`` returned.
            grad_out: Gradient of out, (batch, heads_q, seq_q, head_size).
            grad_lse: Gradient of lse, (batch, heads_q, seq_q); zero by default.
            causal: Same as in ``forward``.
            scale: Same as in ``forward``.
            algorithm: Which kernel to run.
            deterministic: Whether the sums have a fixed order.
            features: Same as in ``forward``.
            bias_gradient: (batch, heads_q, seq_q, seq_kv), which receives the gradient of the bias; on a CPU, zeros.

        Raises:
            ValueError: If the kernels do not support the problem.
        """
        problem = _problem(q, k, causal, scale, algorithm, features)
        gradients = [torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        workspace = self._workspace("backward", problem, q)
        args = _Backward(
            problem,
            *(_tensor(x) for x in (q, k, v, out, grad_out)),
            lse.data_ptr(),
            None if grad_lse is None else grad_lse.data_ptr(),
            *(_tensor(x) for x in gradients),
            workspace.data_ptr(),
            deterministic,
            None if bias_gradient is None else bias_gradient.data_ptr(),
        )
        self._call("backward", args, q.device)
        dq, dk, dv = gradients
        return dq, dk, dv

    def _workspace(self, direction: str, problem: _Problem, like: torch.Tensor) -> torch.Tensor:
        size = getattr(self.library, f"flash_attention_{direction}_workspace")
        size.restype = ctypes.c_int64
        workspace = torch.empty(size(ctypes.byref(problem)) + 256, dtype=torch.uint8, device=like.device)
        # The emulator's workspace comes from the CPU's allocator, which aligns to 64 bytes.
        return workspace[-workspace.data_ptr() % 256 :]

    def _call(self, direction: str, args: ctypes.Structure, device: torch.device) -> None:
        suffix = "_cpu" if self.machine in CPU_FLAGS else ""
        function = getattr(self.library, f"flash_attention_{direction}{suffix}")
        function.restype = ctypes.c_char_p
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        error = function(ctypes.byref(args), ctypes.c_void_p(stream))
        if error is not None:
            raise ValueError(error.decode())


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _tensor(x: torch.Tensor) -> _Tensor:
    if x.dim() != 4 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        raise ValueError(
            f"expected (batch, heads, sequence, head_size) with unit stride, got {tuple(x.shape)}, {x.stride()}"
        )
    return _Tensor(x.data_ptr(), (ctypes.c_int64 * 3)(*x.stride()[:3]))


def _problem(
    q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float | None, algorithm: Algorithm, features: Features
) -> _Problem:
    batch, heads_q, seq_q, head_size = q.shape
    return _Problem(
        _SCALAR_TYPES[q.dtype], batch, heads_q, k.shape[1], seq_q, k.shape[2], head_size,
        head_size**-0.5 if scale is None else scale, causal, algorithm.value, features.structure(),
    )  # fmt: skip


@cache
def build_kernels(machine: Machine, architecture: str = "sm_90a") -> Kernels:
    """Compile the kernels (cached in a folder by their content) and load them.

    Args:
        machine: A key of :data:`CPU_FLAGS` and ``"emulator"`` need g++ and, for the emulator, CUDA's headers;
            ``"cuda"`` nvcc and a GPU.
        architecture: Target architecture of the ``"cuda"`` build.

    Raises:
        BuildError: If a compiler is missing or fails.
    """
    nvcc = find_nvcc()
    if machine not in CPU_FLAGS and nvcc is None:
        raise BuildError(
            "the attention kernels need nvcc or, for the emulator, CUDA's headers beside it; found neither"
        )
    commands: dict[str, list[str]] = {}
    # GCC 12 takes its own headers' undefined vectors for a mistake (GCC bug 105593).
    unsound = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    host = ["g++", "-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra", "-Werror", *unsound]
    commands["c_interface.cpp"] = [
        *host,
        f"-DFLASH_ATTENTION_{'CPU' if machine in CPU_FLAGS else machine.upper()}",
        "-c",
        str(SOURCES / "c_interface.cpp"),
    ]
    if machine in CPU_FLAGS:
        commands["cpu.cpp"] = [*host, *CPU_FLAGS[machine], f"-I{INCLUDE_DIR}", "-c", str(SOURCES / "cpu.cpp")]
    if machine == "emulator" and nvcc is not None:
        # nvcc passes C++ on to g++ and knows where CUDA's headers are.
        flags = ["-std=c++17", "-O1", "-Xcompiler", "-fPIC", "-DFLASH_EMULATED", "-x", "c++"]
        commands |= {name: [str(nvcc), *flags, "-c", str(SOURCES / name)] for name in KERNEL_FILES}
    if machine == "cuda" and nvcc is not None:
        code = f"arch={architecture.replace('sm_', 'compute_')},code={architecture}"
        flags = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-gencode", code]
        commands |= {name: [str(nvcc), *flags, "-c", str(SOURCES / name)] for name in KERNEL_FILES}
    link = [str(nvcc), "-shared", "-cudart", "static"] if machine == "cuda" else ["g++", "-shared"]
    library = _compile(machine, commands, link)
    return Kernels(ctypes.CDLL(str(library)), machine)


def _compile(machine: str, commands: dict[str, list[str]], link: list[str]) -> Path:
    digest = hashlib.sha256(repr((sorted(commands.items()), link)).encode())
    folders = (SOURCES, SOURCES.parent / "common", INCLUDE_DIR / "native_build")
    for source in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
        digest.update(source.read_bytes())
    library = build_root(cuda=machine == "cuda") / f"attention-kernels-{digest.hexdigest()[:16]}" / f"{machine}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{library}.lock"):
        if not library.exists():
            objects = {name: library.parent / f"{name.replace('/', '-')}.o" for name in commands}
            with ThreadPoolExecutor(max_workers=8) as pool:
                for _ in pool.map(_run, ([*command, "-o", str(objects[name])] for name, command in commands.items())):
                    pass
            partial = library.with_suffix(".partial")
            _run([*link, "-o", str(partial), *map(str, objects.values())])
            partial.replace(library)  # whoever finds the library finds all of it
    return library


def _run(command: list[str]) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{answer.stderr[-2000:]}")
