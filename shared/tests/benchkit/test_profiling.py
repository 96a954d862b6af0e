"""The profiler's remarks are kept off standard error, and the environment is what it was."""

from __future__ import annotations

import os

import warm_python

from benchkit.timing.profiling import quiet_profiler

PROGRAM = """
import torch
from benchkit.timing.profiling import quiet_profiler
for _ in range(2):
    with quiet_profiler(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        torch.ones(2) + 1
"""


def test_a_profile_prints_nothing(monkeypatch):
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    done = warm_python.run(["-c", PROGRAM], env=os.environ)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_environment_is_left_as_it_was(monkeypatch):
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    with quiet_profiler():
        assert os.environ["KINETO_LOG_LEVEL"] == "99"
    assert "KINETO_LOG_LEVEL" not in os.environ
    monkeypatch.setenv("KINETO_LOG_LEVEL", "1")
    with quiet_profiler():
        assert os.environ["KINETO_LOG_LEVEL"] == "1"
