"""Captures what torch.compile does as typed records: graphs, breaks, recompilations, phases, eager functions."""
