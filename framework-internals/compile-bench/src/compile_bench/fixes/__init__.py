"""Changes of the source that remove a graph break, and their verification."""
