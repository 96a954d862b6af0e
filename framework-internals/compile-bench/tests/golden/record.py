"""Records the golden traces of the torch that runs this file, and what it says of the catalogue's programs."""

import inspect
import json
import re
from pathlib import Path

import program
import torch

from compile_bench.capture.collector import Collector, user_code_filter
from compile_bench.catalogue import CAUSES

FOLDER = Path(__file__).parent
METRICS = ("fail_type", "fail_reason", "co_name", "co_filename", "co_firstlineno", "guard_count", "graph_op_count")
METRICS += ("fail_user_frame_filename", "fail_user_frame_lineno")


def neutral(text):
    """Replace the paths of this machine. PyTorch shortens some of them from the left."""
    library, own = str(Path(torch.__file__).parent), str(FOLDER)
    for tail in range(len(own)):
        text = text.replace(f"# {own[tail:]}/program.py", "# program.py")
    return text.replace(library, "/library/torch").replace(own, "/user")


def entry(event):
    detail = {key: event.detail[key] for key in METRICS if event.detail.get(key) is not None}
    text = event.payload.split("\nTraceback (most recent call last):")[0]
    if event.kind == "dynamo_cpp_guards_str":
        text = next(line for line in text.splitlines() if "Guard latency" in line)
    return json.loads(neutral(json.dumps([event.kind, event.compile_id, detail, text])))


def said_of(cause):
    """Reason or guard, text of the line, and the part that broke, of a cause's own program; None if it shows none."""
    repro = cause.make()
    torch.compiler.reset()
    function = torch.compile(repro.broken, backend="eager", **cause.options)
    with Collector() as collector:
        for index, arguments in enumerate(repro.calls):
            with repro.context(index):
                function(*arguments)
    trace = collector.trace(user_code_filter(launcher=False))
    file = inspect.getsourcefile(inspect.unwrap(cause.make))
    lines = Path(file).read_text().splitlines()
    if cause.kind == "break":
        found = [(each.reason, each.source, each.columns) for each in trace.breaks]
    else:
        found = [(each.guard, lines[each.line - 1].strip(), None) for each in trace.recompiles if each.file == file]
    numbers = re.compile(r"\b\d{9,}\b")  # ids of objects
    return next(([numbers.sub("N", seen), *rest] for seen, *rest in found if re.search(cause.pattern, seen)), None)


def record_advice(version):
    said = {name: said_of(cause) for name, cause in CAUSES.items() if cause.kind != "silent"}
    rows = [f" {json.dumps(name)}: {json.dumps(row)}" for name, row in said.items() if row is not None]
    (FOLDER / f"advice-torch-{version}.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


def main():
    for name, run in program.PROGRAMS.items():
        torch._dynamo.reset()
        with Collector() as collector:
            run()
        kinds = ("dynamo_graph_break_reason", "recompile_reasons", "dynamo_cpp_guards_str")
        kinds += ("dynamo_output_graph", "compilation_metrics")
        lines = [json.dumps(entry(event)) + "\n" for event in collector.events if event.kind in kinds]
        path = FOLDER / f"{name}-torch-{torch.__version__.split('+')[0]}.jsonl"
        path.write_text("".join(lines))
        print(path.name, len(lines))
    record_advice(torch.__version__.split("+")[0])


if __name__ == "__main__":
    main()
