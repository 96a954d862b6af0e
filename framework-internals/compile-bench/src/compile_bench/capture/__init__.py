"""What torch.compile did: events, frames and phases, as typed records."""
