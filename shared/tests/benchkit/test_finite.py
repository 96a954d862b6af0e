"""A finite number as an option: every command that samples takes the same kind of time, and no limit is ``nan``."""

import re
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from benchkit.command.finite import finite_option, seconds_option

app = typer.Typer()


@app.command()
def sample(
    seconds: Annotated[float, seconds_option(help="Sampling time.")] = 1.0,
    limit: Annotated[float | None, finite_option(help="Limit.")] = None,
) -> None:
    typer.echo(f"{seconds:g} s, {limit}")


def refused(option: str, number: str) -> str:
    answer = CliRunner().invoke(app, [option, number], env={"TERM": "dumb", "COLUMNS": "200"})
    assert answer.exit_code == 2
    return re.sub(r"\s+", " ", answer.stderr)


@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf", "0.009"])
def test_what_is_no_time_is_named(number):
    assert f"expected a finite number of seconds, at least 0.01, got {number}" in refused("--seconds", number)


@pytest.mark.parametrize("number", ["-1", "nan", "inf"])
def test_what_is_no_limit_is_named(number):
    assert f"expected a finite number, at least 0, got {number}" in refused("--limit", number)


def test_a_number_is_taken_as_it_is():
    assert CliRunner().invoke(app, ["--seconds", "0.5", "--limit", "0"]).output == "0.5 s, 0.0\n"
    assert CliRunner().invoke(app, []).output == "1 s, None\n"
