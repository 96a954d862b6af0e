// Phi(-a) * exp(a^2 / 2) for a >= 0 by a polynomial in t = 1 / (1 + 0.3 a), with a relative error below 7e-8 up to a = 14.5, where
// Phi(-a) underflows. erfc has no such range in one formula; and 1 + erf, of which torch makes GELU, loses all digits below -5.
#pragma once

#define CUSTOM_OPS_NORMAL_STEP 0.3f
// The coefficients from the highest power down: first(c) once, then next(c).
#define CUSTOM_OPS_NORMAL_TAIL(first, next)                                                                           \
  first(3.84074399e-2f) next(-1.69307768e-1f) next(2.28952378e-1f) next(-7.68403038e-2f) next(1.42765686e-1f)         \
  next(9.45857018e-2f) next(1.21945299e-1f) next(1.19484201e-1f) next(7.37262917e-6f)
