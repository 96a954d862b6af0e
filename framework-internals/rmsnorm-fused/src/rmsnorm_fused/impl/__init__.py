"""The implementations. None imports another, and none is imported before it is used."""
