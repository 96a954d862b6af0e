"""Where and why two functions, or two optimizers, one in torch and one in JAX, begin to differ."""
