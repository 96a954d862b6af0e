"""The functions that run below a CPU kernel, from stepping through it instruction by instruction.

This is an option for x86-64 Linux with a C compiler. Each instruction takes one signal (1 to 15 µs), and only the
calling thread is seen. Function names come from the symbol table of the wheel's ``libtorch_cpu.so``. It also names the
source files, whose names contain the instruction set of a vectorised loop (``BinaryOpsKernel.cpp.AVX512.cpp``).
"""

from dispatcher_trace.capture.native_step.stepper import Stepper, unavailable

__all__ = ["Stepper", "unavailable"]
