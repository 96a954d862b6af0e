"""The implementations. Each is imported only when it is used, and none imports another."""
