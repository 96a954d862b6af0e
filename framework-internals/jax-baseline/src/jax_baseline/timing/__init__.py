"""The variants of the step that are timed, and what a run of the lens measures of them."""
