"""What a command prints where its output goes to a file."""

from benchkit.report.rendering import block_text


def printed_text(describe, *args):
    """The blocks that ``describe`` makes of ``args``, as Markdown."""
    return "\n\n".join(filter(None, map(block_text, describe(*args))))
