"""The operators as PyTorch's dispatcher knows them: schemas, derivatives, batching and sharding rules."""
