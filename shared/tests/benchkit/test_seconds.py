"""A time as an option: every command that samples takes the same kind of number."""

import re
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from benchkit.command.seconds import seconds_option

app = typer.Typer()


@app.command()
def sample(seconds: Annotated[float, seconds_option(help="Sampling time.")] = 1.0) -> None:
    typer.echo(f"{seconds:g} s")


@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf", "0.009"])
def test_what_is_no_time_is_named(number):
    answer = CliRunner().invoke(app, ["--seconds", number], env={"TERM": "dumb", "COLUMNS": "200"})
    assert answer.exit_code == 2
    assert f"expected a finite number of seconds, at least 0.01, got {number}" in re.sub(r"\s+", " ", answer.stderr)


def test_a_time_is_taken_as_it_is():
    assert CliRunner().invoke(app, ["--seconds", "0.5"]).output == "0.5 s\n"
    assert CliRunner().invoke(app, []).output == "1 s\n"
