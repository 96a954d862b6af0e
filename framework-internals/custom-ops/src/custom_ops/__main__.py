"""The command ``custom-ops``, and ``python -m custom_ops``."""

from benchkit.command import one_line_errors, with_tools


def main() -> None:
    """Run the command line, or say what to install if it lacks a package."""
    with one_line_errors("custom-ops"), with_tools("custom-ops"):
        from custom_ops.cli import app
    app(prog_name="custom-ops")


if __name__ == "__main__":
    main()
