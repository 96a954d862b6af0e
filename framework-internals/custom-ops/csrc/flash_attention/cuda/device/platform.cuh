// The machine that the kernels are compiled for: a GPU, or with FLASH_EMULATED the emulator on a CPU.
#pragma once

#ifdef FLASH_EMULATED
#include "emulator.h"
#else
#include "primitives.cuh"
#endif
