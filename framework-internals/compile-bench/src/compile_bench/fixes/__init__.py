"""Changes of the source that fix graph breaks, and their verification."""
