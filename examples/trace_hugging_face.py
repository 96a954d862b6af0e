"""dispatcher-trace on a Hugging Face GPT-2: its keys, its busiest operators, its hidden copies.

python examples/trace_hugging_face.py [trace.html]    with a path: the whole trace as a page to open in a browser
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from dispatcher_trace import trace

torch.manual_seed(0)
shape = GPT2Config(
    n_layer=2, n_embd=64, n_head=2, n_positions=64, vocab_size=256, bos_token_id=0, eos_token_id=0
)  # fmt: skip
model = GPT2LMHeadModel(shape).eval()
tokens = torch.randint(0, 256, (1, 32))

with torch.no_grad(), trace(scope="core") as recorded:
    logits = model(tokens).logits

print(f"{len(recorded.all_calls)} operator calls, {len(recorded.hops)} hops")
print("by key:", ", ".join(f"{key} {count}" for key, count in Counter(hop.key for hop in recorded.hops).most_common()))
busiest = Counter(call.operator for call in recorded.all_calls).most_common(5)
print("most called:", ", ".join(f"{operator} × {count}" for operator, count in busiest))
for finding in recorded.findings:
    print(finding)
if len(sys.argv) > 1:
    Path(sys.argv[1]).write_text(recorded.to_html(), encoding="utf-8")
