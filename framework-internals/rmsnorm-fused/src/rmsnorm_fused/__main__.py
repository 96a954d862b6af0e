"""The command ``rmsnorm-fused``, and ``python -m rmsnorm_fused``."""

from benchkit.command import one_line_errors, with_tools


def main() -> None:
    """Run the command line, or say what to install if it lacks a package."""
    with one_line_errors("rmsnorm-fused"), with_tools("rmsnorm-fused"):
        from rmsnorm_fused.cli import app
    app(prog_name="rmsnorm-fused")


if __name__ == "__main__":
    main()
