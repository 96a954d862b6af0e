"""An engine of torch in several processes: torchrun starts them, and each takes its part of every step.

This process asks, and all ranks do the same: it puts a call into a store of torch's, and each rank answers there. Calls
and answers are JSON. When a rank fails, torchrun ends the others, and the call that waits raises its reason.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from benchkit import UserError
from benchkit.device import Device
from benchkit.errors import first_line
from engines.kernel_times import GpuTime, KernelTime
from engines.spec import Engine, EngineSpec, Preparation
from engines.torch_engine import TorchEngine
from torch_baseline.config import GPTConfig, TrainConfig

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_HOST = "127.0.0.1"
_POLL = timedelta(seconds=1)  # an answer ends a wait at once; this is how soon a rank that ended is noticed
_IDLE = timedelta(days=1)  # the owner of the engine may take long until its next call; its end ends the wait


def make_engine(spec: EngineSpec, model: GPTConfig, training: TrainConfig, device: Device) -> Engine:
    """Make an engine of PyTorch, in several processes if it has several devices.

    The process of the engine calls this function.

    Args:
        spec: The variant.
        model: Shape of the model, with the changes of the variant.
        training: Settings; the batch size is that of each device.
        device: Device of the engine.

    Raises:
        UserError: If the engine is one of JAX.
    """
    if spec.framework != "torch":
        raise UserError(
            f"this process makes engines of torch, got one of {spec.framework}; "
            "expected the factory jax_baseline.timing.jax_engine.make_engine"
        )
    return (TorchEngine if spec.devices == 1 else RankedEngine)(spec, model, training, device)


class RankedEngine:
    """The step of ``torch_baseline`` under DDP or FSDP2, with a process for each device.

    Args:
        spec: The variant, with as many devices as there are to be ranks.
        model: Shape of the model.
        config: Settings; the batch size is that of each device.
        device: Kind of device.

    Raises:
        UserError: If a rank cannot make its engine.
    """

    def __init__(self, spec: EngineSpec, model: GPTConfig, config: TrainConfig, device: Device) -> None:
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if device == "cuda" and spec.devices > (present := torch.cuda.device_count()):
            raise UserError(f"expected {spec.devices} GPUs, found {present}")
        self._ranks, self._calls = spec.devices, 0
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self._launched: Future[None] = Future()
        threading.Thread(target=self._launch, daemon=True).start()
        config = replace(config, parallel="ddp" if spec.data > 1 else "fsdp")
        plain = {"spec": asdict(spec), "model": asdict(model), "training": config.as_plain(), "device": device}
        self._ask("make", **plain)

    def prepare(self) -> Preparation:
        """Take the first step."""
        return Preparation(**self._ask("prepare")[0])

    def restart(self, seed: int) -> None:
        """Begin again with other initial weights, see :meth:`engines.torch_engine.TorchEngine.restart`."""
        self._ask("restart", seed=seed)

    def run(self, steps: int) -> None:
        """Take this many steps and wait for all devices."""
        self._ask("run", steps=steps)

    def next_loss(self) -> float:
        """Take one step and return its loss over all ranks."""
        return float(self._ask("next_loss")[0])

    def peak_memory(self) -> int | None:
        """Peak memory of the rank with the most, in bytes; None on a CPU."""
        return max((peak for peak in self._ask("peak_memory") if peak is not None), default=None)

    def kernel_times(self, steps: int) -> list[KernelTime]:
        """Return the time of each kernel of rank 0."""
        return [KernelTime(*kernel) for kernel in self._ask("kernel_times", steps=steps)[0]]

    def gpu_time(self, steps: int) -> GpuTime | None:
        """Return what a GPU does in a step, the mean over the ranks; None on a CPU."""
        times = [time for time in self._ask("gpu_time", steps=steps) if time is not None]
        return GpuTime(*(sum(part) / len(times) for part in zip(*times, strict=True))) if times else None

    def _launch(self) -> None:
        from torch_baseline.parallel import launch

        try:
            launch(self._ranks, ["-m", __name__, str(self._store.port)])
            self._launched.set_result(None)
        except BaseException as error:
            self._launched.set_exception(error)

    def _ask(self, method: str, **arguments: Any) -> list[Any]:
        """Let every rank call a method; return their answers in order."""
        self._store.set(f"call {self._calls}", json.dumps([method, arguments]))
        keys = [f"answer {self._calls} {rank}" for rank in range(self._ranks)]
        self._wait_for(keys)
        self._calls += 1
        return [json.loads(answer)["value"] for answer in self._store.multi_get(keys)]

    def _wait_for(self, keys: list[str]) -> None:
        """Wait until the store has the keys: one message while all goes well, since a call may be timed."""
        from torch.distributed import DistStoreError

        while True:
            try:
                return self._store.wait(keys, _POLL)
            except DistStoreError:  # not yet
                ended = self._launched.done()  # before the look for a reason, which comes first
                if self._store.check(["failure"]):
                    raise UserError(self._store.get("failure").decode()) from None
                if ended and not self._store.check(keys):
                    self._launched.result()  # raises what ended a rank
                    raise UserError("the ranks ended before they answered") from None


def _serve(port: int) -> None:
    """Make this rank's engine and answer calls until the asking process ends.

    The first failure of a rank is the reason that the asking process gives; torchrun then ends the other ranks.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from torch_baseline.parallel import join_world

    store = TCPStore(_HOST, port, is_master=False)

    def receive(number: int) -> tuple[str, dict[str, Any]]:
        store.wait([f"call {number}"], _IDLE)
        method, arguments = json.loads(store.get(f"call {number}"))
        return method, arguments

    try:
        _, first = receive(0)
        spec, model, device = EngineSpec(**first["spec"]), GPTConfig(**first["model"]), first["device"]
        config = TrainConfig.from_plain(first["training"])
        processes = replace(config, batch_size=config.batch_size * spec.devices)
        with join_world(processes, device) as world:
            engine = TorchEngine(spec, model, config, device, world)
            answer = _answering(store, world.rank)
            answer(0, None)
            for number in itertools.count(1):
                method, arguments = receive(number)
                answer(number, getattr(engine, method)(**arguments))
    except Exception as error:
        store.compare_set("failure", "", first_line(error))  # the first one stays
        raise


def _answering(store: TCPStore, rank: int) -> Callable[[int, Any], None]:
    def answer(number: int, value: Any) -> None:
        plain = asdict(value) if isinstance(value, Preparation) else value
        store.set(f"answer {number} {rank}", json.dumps({"value": plain}))

    return answer


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
