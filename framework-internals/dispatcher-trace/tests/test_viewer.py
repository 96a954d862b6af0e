"""A trace as an HTML page and as a Chrome trace."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from dispatcher_trace import Shims, Trace, record
from dispatcher_trace.capture.types import Kernel

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell", "chrome-headless-shell")
_LOGIC = re.compile(r'<script>\n("use strict";\nasync function unpack.*?)</script>', re.DOTALL)


@pytest.fixture(scope="module")
def trace(shims: Shims) -> Trace:
    x = torch.ones(3, 3, requires_grad=True)
    with record(shims, kernels=False) as t:
        torch.softmax(x @ x, -1).sum().backward()
        torch.tensor([1.0])  # its detach_ is not predicted
    return t


def test_the_page_needs_nothing_else(trace: Trace) -> None:
    page = trace.to_html("A <trace> & more")
    assert "<title>A &lt;trace&gt; &amp; more</title>" in page
    assert not re.search(r"(src|href)=|@import|https?://|fetch\(|XMLHttpRequest", page)
    assert page.count("<script") == page.count("</script>") == 3
    assert page == trace.to_html("A <trace> & more")


def test_the_page_says_how_to_read_it_and_walks_through_a_product(trace: Trace) -> None:
    page = trace.to_html()
    intro = page[page.index('<details id="intro" open>') : page.index("</details>")]
    sentences = re.split(r"[.:] (?=[A-Z])", re.sub(r"\s+", " ", re.search(r"<p>(.*?)</p>", intro, re.DOTALL)[1]))
    assert len(sentences) == 5
    assert re.findall(r"<li><code>(\w+)</code> at (\w+)", intro) == [
        ("matmul", "Autograd"),
        ("mm", "Autograd"),
        ("mm", "CPU"),
    ]


def _in_node(page: str, expression: str) -> Any:
    """Evaluate a JavaScript expression with the page's functions and trace."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on PATH")
    logic, payload = _LOGIC.search(page), re.search(r'<script id="trace"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert logic is not None
    assert payload is not None
    source = f"""{logic[1]}
unpack({json.dumps(payload[1])}).then((payload) => {{
  const rows = readTrace(payload);
  const show = (hash) => visibleRows(rows, readState(hash, rows));
  console.log(JSON.stringify({expression}));
}});"""
    done = subprocess.run([node, "-e", source], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_folding_and_searching_in_node(trace: Trace) -> None:
    page = trace.to_html()
    calls, hops = len(trace.all_calls), len(trace.hops)
    shown = _in_node(
        page,
        """{ all: rows.length, folded: show("").length, unfolded: show("#open=all").length,
        softmax: show("#q=_softmax").map((row) => row.operator), wrong: show("#wrong=1").map((row) => row.operator),
        one: show("#open=1").length, back: writeState(readState("#open=all", rows), rows),
        both: writeState(readState("#q=mm&open=1", rows), rows), none: show("#q=nosuchthing").length,
        key: show("#q=autogradcpu mm").filter((row) => row.isHop).every((row) => row.key === "AutogradCPU") }""",
    )
    assert shown["all"] == shown["unfolded"] == calls + hops
    assert shown["folded"] == len(trace.calls)
    assert shown["folded"] < shown["one"] < shown["all"]
    assert "aten::_softmax" in shown["softmax"]
    assert set(shown["wrong"]) == {"aten::detach_"}
    assert shown["back"] == "open=all"
    assert shown["both"] == "q=mm&open=1"
    assert shown["none"] == 0
    assert shown["key"]


@pytest.mark.slow
def test_the_page_in_a_browser(trace: Trace, tmp_path: Path) -> None:
    browser = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no headless browser on PATH ({', '.join(_BROWSERS)})")
    path = tmp_path / "trace.html"
    path.write_text(trace.to_html("A trace"), encoding="utf-8")

    def dom(state: str) -> str:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
        command = [browser, *flags, f"{path.as_uri()}#{state}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)  # which writes rows, too, as text

    folded, unfolded, searched = dom(""), dom("open=all"), dom("q=_softmax")
    assert 'data-ready="yes"' in folded
    assert folded.count('class="row') == len(trace.calls)
    assert unfolded.count('class="row') == len(trace.all_calls) + len(trace.hops)
    assert "<mark>_softmax</mark>" in searched
    hovers = re.findall(r'class="key" title="([^"]+)"', unfolded)
    assert len(hovers) == len(trace.hops)
    assert all(keys.startswith("keys {") for keys in hovers)


def test_perfetto_nests_hops_in_calls(trace: Trace) -> None:
    document = json.loads(json.dumps(trace.to_perfetto()))
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    calls = [event for event in spans if event["cat"] == "call"]
    hops = [event for event in spans if event["cat"] == "hop"]
    assert (len(calls), len(hops)) == (len(trace.all_calls), len(trace.hops))
    assert all(event["dur"] >= 0 for event in spans)
    by_hop = {event["args"]["hop"]: event for event in hops}
    for call in trace.all_calls:
        outer = by_hop[call.hops[0].number]
        for hop in call.hops[1:]:
            inner = by_hop[hop.number]
            assert outer["ts"] <= inner["ts"]
            assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-6
    names = {event["args"]["name"] for event in document["traceEvents"] if event["ph"] == "M"}
    assert {"dispatcher", "main"} <= names


def test_perfetto_draws_an_arrow_to_a_device_kernel(trace: Trace) -> None:
    call = trace.all_calls[0]
    before = call.kernels
    call.kernels = (Kernel("nvjet_hsh_128x64", (1, 1, 1), (128, 1, 1), 2e-6, 168, 98304, 7, 5000),)
    try:
        events = trace.to_perfetto()["traceEvents"]
    finally:
        call.kernels = before
    (kernel,) = [event for event in events if event.get("cat") == "kernel"]
    assert (kernel["ts"], kernel["dur"], kernel["tid"]) == (5.0, 2.0, 7)
    assert kernel["args"]["library"] == "cuBLAS"
    assert [event["ph"] for event in events if event.get("cat") == "launch"] == ["s", "f"]
