"""Runs programs in forks of one Python that has torch loaded, for tests that need a process of their own.

To import torch takes a new interpreter most of two seconds. A fork starts with torch and the libraries of command lines
and figures loaded, and imports what it uses of ours anew. Tests of an interpreter's start, of its options or of torch's
own variables need a real one.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, cast

from benchkit.processes import ChildCrashed
from benchkit.processes.fork_server import child_environment, fork_server
from benchkit.processes.server import ChildSettings

LOADED = (
    *("torch", "typer", "rich.console", "rich.progress", "jinja2"),
    *("matplotlib.figure", "matplotlib.backends.backend_svg", "xml.sax.saxutils"),
    *(("pydantic.type_adapter", "pydantic.types") if find_spec("pydantic") else ()),  # newer typer's, at the first call
)
_OURS = ("benchkit", "warm_python")  # what the fork server itself has loaded
_ENVIRONMENT = child_environment({})  # the same for every program, so that all share one server


def run(
    arguments: Sequence[object], *, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run([sys.executable, *arguments])`` does.

    Args:
        arguments: ``-W ACTION`` any number of times; ``-c PROGRAM``, ``-m MODULE`` or a file; what the program gets.
        env: The whole environment; its ``PYTHONPATH`` comes before this process' path.
        cwd: The working directory; this process' own by default.

    Raises:
        ValueError: For another option of the interpreter, which needs a real one.
    """
    words = [str(argument) for argument in arguments]
    first = next(word for word, before in zip(words, ["", *words], strict=False) if "-W" not in (word, before))
    if first.startswith("-") and first not in ("-c", "-m"):
        raise ValueError(f"{first} is an option of the interpreter: start one")
    path = list(filter(None, sys.path))
    settings = ChildSettings({}, str(cwd or Path.cwd()), [str(Path(__file__).parent), *path])
    with tempfile.TemporaryDirectory() as folder, fork_server(LOADED, _ENVIRONMENT) as server:
        out, err = Path(folder, "out"), Path(folder, "err")
        with server.child(settings) as child:
            with suppress(ChildCrashed):  # every program ends its process
                child.call(partial(_become, words, dict(env), path, (str(out), str(err))), "the program", math.inf)
            return subprocess.CompletedProcess(words, child.exit_status(), out.read_text(), err.read_text())


def _become(words: Sequence[str], env: Mapping[str, str], path: Sequence[str], streams: Sequence[str]) -> NoReturn:
    """In the fork: run a program and end as an interpreter does."""
    gc.freeze()  # a collection would look through all that is loaded, and copy its pages by doing so
    for target, name in enumerate(streams, start=1):
        with Path(name).open("wb") as stream:
            os.dup2(stream.fileno(), target)
    os.environ.clear()
    os.environ.update(env)
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    cast("list[Any]", warnings.filters).remove(("ignore", None, Warning, None, 0))  # the fork server's own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        _run_program(words, path)
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_program(words: Sequence[str], path: Sequence[str]) -> None:
    kind, *rest = words
    while kind == "-W":
        warnings.simplefilter(cast("Any", rest.pop(0)))
        kind = rest.pop(0)
    name = kind if kind not in ("-c", "-m") else rest.pop(0)
    first = "" if kind in ("-c", "-m") else str(Path(name).parent)
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv = ["-c" if kind == "-c" else name, *rest]
    if kind == "-c":
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(name, "<string>", "exec"), vars(module))  # noqa: S102 - a test's own program
    elif kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")
