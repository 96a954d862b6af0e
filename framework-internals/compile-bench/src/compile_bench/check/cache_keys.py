"""Why the compiler's caches miss in another run or on another machine: the parts of their keys, written and compared.

A cache finds a compiled graph if its key, a hash of some hundred parts, is the same. The file that :func:`write_keys`
writes has every part with its own hash; :func:`compare_keys` says in plain words which parts of two files differ.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from benchkit import UserError
from benchkit.results import write_text_atomically
from compile_bench.capture.parsing import Event
from compile_bench.capture.text import plural, some

Cache = Literal["fx_graph", "aotautograd"]

_EVENT = re.compile(r"(?P<cache>fx_graph|aotautograd)_cache_(?P<state>hit|miss|bypass)")
_PART = re.compile(r"\[(?P<digest>\w+)\] (?P<name>.+?): (?P<text>.*)", re.DOTALL)

VERSION = 1

# What a part is, by PyTorch's name of it; the first match counts.
_MEANINGS = tuple(
    (re.compile(pattern), meaning)
    for pattern, meaning in (
        (r"gm", "the operations of the graph"),
        (r"example_inputs\[(\d+)\]", r"input \1 of the graph"),
        (r"inductor_config\[(.+)\]", r"setting torch._inductor.config.\1"),
        (r"inductor_config_comms\[(.+)\]", r"setting of Inductor for communication, \1"),
        (r"fx_kwargs\[cudagraphs\]", "whether CUDA graphs are asked for (the mode)"),
        (r"fx_kwargs\[(.+)\]", r"how the graph is compiled, \1"),
        (r"torch_version", "the source files of torch (another version or build)"),
        (r"system_info(\[.*\])?", "the GPU, its driver or its Triton"),
        (r"cpp_runtime_thread_count", "the number of CPU threads (torch.set_num_threads, OMP_NUM_THREADS)"),
        (r"deterministic_algorithms.*", "torch.use_deterministic_algorithms"),
        (r"default_dtype", "torch.set_default_dtype"),
        (r"cuda_matmul_settings", "torch.backends.cuda.matmul (TF32, reduced-precision sums)"),
        (r"cache_key_tag", "torch.compiler.config.cache_key_tag"),
        (r"user_defined_triton_source.*|triton_kernel_source_codes.*", "the source of a Triton kernel of yours"),
        (r"autograd_config", "a setting of torch._functorch.config"),
        (r"aot_config", "how AOTAutograd sees the arguments (names, views, which are parameters)"),
        (r"grad_enabled", "whether gradients are recorded (torch.no_grad)"),
        (r"autocast_state(\[.*\])?", "torch.autocast"),
        (r".*custom.*pass.*|.*_uuids?", "a custom pass of yours"),
        (r"(.+)", r"\1"),
    )
)
_TENSOR_FIELD = re.compile(r"(\w+)=((?:[^,()\[\]]|\([^()]*(?:\([^()]*\)[^()]*)*\))+)")
_SHORT = 60
_DIFFERENT_LINES = 4


@dataclass(frozen=True)
class KeyPart:
    """One part of a key."""

    name: str  # PyTorch's name of it, such as "example_inputs[0]" or "inductor_config[max_autotune]"
    digest: str  # its hash. Parts are equal if and only if their hashes are; the text may contain addresses
    text: str  # its value as text


@dataclass(frozen=True)
class CacheKey:
    """The key under which a cache looked for one graph."""

    cache: Cache  # "aotautograd" keeps whole graphs with their backward pass, "fx_graph" Inductor's code of one
    compile_id: str  # id of the compilation
    state: str  # "hit", "miss", or "bypass" if PyTorch cannot cache the graph
    key: str = ""  # the key; empty for a bypass
    parts: tuple[KeyPart, ...] = ()  # its parts, in PyTorch's order
    reason: str = ""  # why PyTorch cannot cache the graph; empty if it can

    @property
    def backward(self) -> bool:
        """Whether the graph is a backward pass."""
        return any(part.name == "fx_kwargs[is_backward]" and part.text == "True" for part in self.parts)


@dataclass(frozen=True)
class KeyFile:
    """The keys of one target in one run."""

    target: str  # target, kind of step, device and mode
    facts: Mapping[str, str]  # versions and machine, by name
    keys: tuple[CacheKey, ...]  # the keys, in the order in which the caches were asked


def read_cache_keys(events: Iterable[Event]) -> tuple[CacheKey, ...]:
    """The keys of all cache look-ups, in order."""
    return tuple(
        _key(event, match["cache"], match["state"]) for event in events if (match := _EVENT.fullmatch(event.kind))
    )


def _key(event: Event, cache: str, state: str) -> CacheKey:
    content = json.loads(event.payload)
    lines = (_PART.fullmatch(line) for line in content.get("components") or ())
    return CacheKey(
        cast(Cache, cache),
        event.compile_id,
        state,
        content.get("key") or "",
        tuple(KeyPart(line["name"], line["digest"], line["text"]) for line in lines if line is not None),
        str(content.get("cache_bypass_reason") or ""),
    )


def write_keys(file: Path, keys: KeyFile) -> None:
    """Write keys to a file. Equal parts of several keys are written once."""
    texts = {part.digest: part.text for key in keys.keys for part in key.parts}
    entries = [
        {
            "cache": key.cache,
            "compile_id": key.compile_id,
            "state": key.state,
            "key": key.key,
            "reason": key.reason,
            "parts": {part.name: part.digest for part in key.parts},
        }
        for key in keys.keys
    ]
    content = {"version": VERSION, "target": keys.target, "facts": keys.facts, "keys": entries, "texts": texts}
    write_text_atomically(file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_keys(file: Path) -> KeyFile:
    """The keys in a file."""
    try:
        content = json.loads(file.read_text())
        if content["version"] != VERSION:
            raise UserError(f"{file} is of version {content['version']}; this compile-bench reads version {VERSION}")
        texts = content["texts"]
        keys = tuple(
            CacheKey(
                entry["cache"],
                entry["compile_id"],
                entry["state"],
                entry["key"],
                tuple(KeyPart(name, digest, texts[digest]) for name, digest in entry["parts"].items()),
                entry["reason"],
            )
            for entry in content["keys"]
        )
        return KeyFile(content["target"], content["facts"], keys)
    except FileNotFoundError:
        raise UserError(f"there is no file {file}; `compile-bench cache-key TARGET --file {file}` writes it") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is not a file of compile-bench cache-key ({type(error).__name__}: {error}); write it anew"
        ) from error


def compare_keys(before: KeyFile, after: KeyFile) -> list[str]:
    """Say which parts of the keys differ, one line for each part with the graphs that it concerns.

    Empty if all graphs have the same keys.
    """
    pairs = _matched(before.keys, after.keys)
    lines = []
    causes: dict[str, list[str]] = {}
    for name, (one, other) in pairs.items():
        if one is None or other is None:
            lines.append(f"{name} is in the {'second' if one is None else 'first'} file only")
        elif "bypass" in (one.state, other.state):
            lines += [f"{name} is never cached: {key.reason}" for key in (one, other) if key.state == "bypass"][:1]
        elif one.key != other.key:
            for cause in _differences(one, other):
                causes.setdefault(cause, []).append(name)
    missed = len({name for names in causes.values() for name in names})
    if causes:
        lines.append(f"{missed} of {plural(len(pairs), 'key')} differ, so the caches miss:")
        lines += [f"  {cause} ({'all' if len(names) == missed else some(names)})" for cause, names in causes.items()]
    if not lines:
        return []
    facts = [
        f"{name}: {before.facts.get(name, 'none')} → {after.facts.get(name, 'none')}"
        for name in dict.fromkeys([*before.facts, *after.facts])
        if before.facts.get(name) != after.facts.get(name)
    ]
    return [*lines, f"the runs differ in {'; '.join(facts)}"] if facts else lines


def _matched(
    before: Iterable[CacheKey], after: Iterable[CacheKey]
) -> dict[str, tuple[CacheKey | None, CacheKey | None]]:
    """The keys of the same graph in both runs, by the name of the graph."""
    one, other = _named(before), _named(after)
    return {name: (one.get(name), other.get(name)) for name in dict.fromkeys([*one, *other])}


def _named(keys: Iterable[CacheKey]) -> dict[str, CacheKey]:
    times: Counter[str] = Counter()
    named = {}
    for key in keys:
        which = "in AOTAutograd" if key.cache == "aotautograd" else "backward" if key.backward else "forward"
        name = f"{key.compile_id} {which}"
        times[name] += 1
        named[name if times[name] == 1 else f"{name}, number {times[name]}"] = key
    return named


def _differences(before: CacheKey, after: CacheKey) -> list[str]:
    """One phrase for every part that differs."""
    one, other = ({part.name: part for part in key.parts} for key in (before, after))
    differences = []
    for name in dict.fromkeys([*one, *other]):
        first, second = one.get(name), other.get(name)
        if first is None or second is None:
            only = "second" if first is None else "first"
            differences.append(f"{_meaning(name)}: in the {only} run only")
        elif first.digest != second.digest:
            differences.append(f"{_meaning(name)}: {_change(first.text, second.text)}")
    return differences or ["no part: PyTorch puts the parts together in another way"]


def _meaning(name: str) -> str:
    return next(
        match.expand(meaning) for pattern, meaning in _MEANINGS if (match := pattern.fullmatch(name)) is not None
    )


def _change(before: str, after: str) -> str:
    """What changed from one text to the other, in one line."""
    if before == after or "�" in before + after:
        return "differs, in what PyTorch does not print"
    one, other = (dict(_TENSOR_FIELD.findall(text)) for text in (before, after))
    if "shape" in one and "shape" in other:
        changed = [
            f"{name} {one.get(name, 'none')} → {value}" for name, value in other.items() if value != one.get(name)
        ]
        return re.sub(r"torch\.(?:Size\((.*?)\))?", r"\1", ", ".join(changed)) or "differs"
    if "\n" in before or "\n" in after:
        return _changed_lines(before.splitlines(), after.splitlines())
    return f"{_shortened(before)} → {_shortened(after)}"


def _changed_lines(before: Sequence[str], after: Sequence[str]) -> str:
    # Behind a statement, torch.fx sets what is no longer needed to None.
    one, other = ([line.strip().split(";  ")[0] for line in lines if line.strip()] for lines in (before, after))
    changed = [
        f"{line[0]} {_shortened(line[1:])}"
        for line in difflib.unified_diff(one, other, lineterm="", n=0)
        if line[0] in "+-" and not line.startswith(("+++", "---"))
    ]
    more = len(changed) - _DIFFERENT_LINES
    return "; ".join(changed[:_DIFFERENT_LINES]) + (f"; {more} more lines" if more > 0 else "")


def _shortened(text: str) -> str:
    text = re.sub(r"BoxedBool\(value=(\w+)\)", r"\1", text)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"
