"""One small GPT, its data and its honest training loop in PyTorch.

``config`` says what is trained and how, ``model`` is the GPT with its replaceable parts, ``data`` the bytes and their
order, ``optim`` the optimizer, the schedule and the moving average, ``checkpoint`` what survives a kill, ``parallel``
several processes, ``train`` the loop.
"""
