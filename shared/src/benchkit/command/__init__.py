"""What command lines share: errors on one line, progress, and Python files that a user names."""

from benchkit.command.errors import one_line_errors, with_tools

__all__ = ["one_line_errors", "with_tools"]
