"""The site of this repository: which of its files are pages, in which order, and their Markdown as MkDocs reads it."""
