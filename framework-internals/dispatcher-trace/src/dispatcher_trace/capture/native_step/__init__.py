"""Below a CPU kernel: which functions really ran, by stepping through it instruction by instruction.

An opt-in, for x86-64 Linux with a C compiler: it takes a signal for every instruction (1 to 15 µs), and sees the
calling thread alone. The names come from the symbol table that the wheel's ``libtorch_cpu.so`` keeps; with them come
the source files, whose names carry the instruction set that a vectorised loop was compiled for
(``BinaryOpsKernel.cpp.AVX512.cpp``).
"""

from dispatcher_trace.capture.native_step.stepper import Stepper, unavailable

__all__ = ["Stepper", "unavailable"]
