"""The implementations. None is imported before it is used, and none imports another but ``native`` its ``prebuilt``."""
