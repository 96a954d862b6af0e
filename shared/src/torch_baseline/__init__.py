"""One small GPT, its data and its training loop in PyTorch."""
