"""A function of JAX as XLA compiles it, and the private parts of jax that this takes."""
