"""The implementations. None is imported before it is used, and none imports another, but that `native` has `prebuilt`
where nothing can be built."""
