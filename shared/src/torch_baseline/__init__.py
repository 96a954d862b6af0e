"""One small GPT, its data and its training loop in PyTorch.

``config`` has the shapes and settings, ``model`` the GPT with its replaceable parts, ``data`` the bytes and their
order, ``optim`` the optimizer, the schedule and the moving average, ``checkpoint`` saving and resuming, ``parallel``
training in several processes, ``train`` the loop.
"""
