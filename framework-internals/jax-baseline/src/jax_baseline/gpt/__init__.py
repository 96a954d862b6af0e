"""The GPT in JAX: model, optimizer, training step, loop, checkpoints and sharding."""
