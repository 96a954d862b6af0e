"""Records the golden traces of the torch that runs this file."""

import json
from pathlib import Path

import program
import torch

from compile_bench.capture.collector import Collector

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


if __name__ == "__main__":
    main()
