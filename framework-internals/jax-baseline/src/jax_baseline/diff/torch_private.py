"""The parts of Inductor that are not public and that this package stands on; nothing else here touches them.

- ``torch._inductor.codecache.PyCodeCache.write(source_code, extra)`` receives the generated module with ``def call(``.
- ``torch._inductor.config``: ``post_grad_custom_post_pass`` sees the graph that is about to be scheduled, and
  ``trace.provenance_tracking_level = 1`` makes the module say, above each launch,
  ``# [Provenance debug handles] kernel:7``.
- ``torch._inductor.debug._inductor_triton_kernel_to_post_grad_node_info`` holds the graph's nodes behind ``kernel:7``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

PROVENANCE_MARK = "# [Provenance debug handles] "


@contextmanager
def observe_inductor(
    on_graph: Callable[[torch.fx.Graph], None], rewrite: Callable[[str, Mapping[str, list[str]]], str]
) -> Iterator[None]:
    """Compile anew inside, showing every graph and letting every generated module be rewritten before it is loaded.

    Args:
        on_graph: called with the graph Inductor is about to lower.
        rewrite: called with a generated module's source and the names of graph nodes behind each launch; returns the
            source to load instead.

    Raises:
        RuntimeError: if this torch keeps one of the parts named above somewhere else.
    """
    config, cache, provenance = _parts()
    write = cache.write.__func__

    def rewriting_write(cls: Any, source_code: str, extra: str = "") -> Any:
        if "def call(" in source_code and "async_compile" in source_code:
            source_code = rewrite(source_code, {name: list(nodes) for name, nodes in provenance().items()})
        return write(cls, source_code, extra)

    settings = {
        "post_grad_custom_post_pass": on_graph,
        "trace.provenance_tracking_level": 1,
        "fx_graph_cache": False,
        "autotune_local_cache": True,
        # A CUDA graph replays what was recorded: no launch could be observed.
        "triton.cudagraphs": False,
    }
    cache.write = classmethod(rewriting_write)
    try:
        with config.patch(settings), torch._functorch.config.patch(enable_autograd_cache=False):
            yield
    finally:
        cache.write = classmethod(write)


def _parts() -> tuple[Any, Any, Callable[[], Mapping[str, list[str]]]]:
    try:
        import torch._functorch.config
        import torch._inductor.config as config
        from torch._inductor import debug
        from torch._inductor.codecache import PyCodeCache

        missing = [
            name
            for owner, name in (
                (config, "post_grad_custom_post_pass"),
                (config.trace, "provenance_tracking_level"),
                (PyCodeCache, "write"),
                (debug, "_inductor_triton_kernel_to_post_grad_node_info"),
            )
            if not hasattr(owner, name)
        ]
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} keeps its Inductor parts elsewhere: {error}") from error
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(missing)} where jax_baseline.diff.torch_private looks for "
            "it; this version has been tested with torch 2.11 and 2.13"
        )
    return config, PyCodeCache, lambda: debug._inductor_triton_kernel_to_post_grad_node_info
