"""The private torch APIs that the package needs. If one is missing, the failure names it."""

import pytest
import torch

from dispatcher_trace.capture import dispatcher, key_sets


def test_every_private_api_is_there() -> None:
    assert dispatcher.missing_apis() == []


def test_a_moved_api_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_PRIVATE", ("_dispatch_keys", "_gone_in_this_version"))
    with pytest.raises(RuntimeError, match=r"has no torch\._C\._gone_in_this_version; .* supports torch 2\.10"):
        dispatcher.require_apis()


def test_table_of_add() -> None:
    table = dispatcher.table("aten::add.Tensor")
    assert table["CPU"].kind == "kernel"
    assert table["AutogradCPU"].kind == "autograd kernel"
    assert table["ADInplaceOrView"].fallthrough
    assert table["CPU"].file.startswith("aten/src/ATen/RegisterCPU")  # no folder of the build machine
    assert dispatcher.table("aten::no_such_operator") == {}


def test_table_follows_a_new_registration() -> None:
    library = torch.library.Library("dispatcher_trace_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    assert dispatcher.table("dispatcher_trace_test::twice").get("CPU") is None
    library.impl("twice", lambda x: x * 2, "CPU")
    assert dispatcher.table("dispatcher_trace_test::twice")["CPU"].kind == "kernel"
    library._destroy()


def test_key_sets() -> None:
    keys = key_sets.bits_of("CPU", "AutogradCPU", "ADInplaceOrView")
    assert key_sets.key_names(keys) == ("AutogradCPU", "ADInplaceOrView", "CPU")
    assert key_sets.key_names(key_sets.below(keys, "AutogradOther")) == ("ADInplaceOrView", "CPU")
    assert key_sets.key_names(key_sets.without(keys, "ADInplaceOrView")) == ("AutogradCPU", "CPU")
    assert key_sets.key_names(key_sets.keys_of(torch.ones(1))) == (
        "AutocastCPU",
        "AutogradCPU",
        "ADInplaceOrView",
        "CPU",
    )
    added = key_sets.bits_of("BackendSelect")
    assert key_sets.key_names(key_sets.computed(keys, added, keys)) == ("BackendSelect",)
