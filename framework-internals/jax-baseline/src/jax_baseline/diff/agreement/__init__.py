"""Whether two functions, one in torch and one in JAX, compute the same: their difference against measured rounding."""
