"""A process that keeps its heap does not fetch the same memory from the system again in every step."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from sordino.lab import machine

COUNTED = """
import resource, sys
import torch
from sordino.lab import machine

if sys.argv[1] == "keep":
    assert machine.keep()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    parts = [torch.ones(9 * 2**20) for _ in range(3)]  # 36 MB each: above what glibc ever keeps by itself

for _ in range(10):  # until the heap has found its size
    step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""


def faults(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", COUNTED, how], capture_output=True, text=True, check=True)
    return int(run.stdout)


GLIBC = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "mallopt")


@pytest.mark.skipif(not GLIBC, reason="this C library is not glibc")
@pytest.mark.slow
def test_a_kept_heap_takes_no_page_faults_once_it_has_grown():
    assert faults("keep") < 100
    assert faults("plain") > 10 * 100


def test_elsewhere_nothing_happens(monkeypatch):
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    assert machine.keep() is False


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: object())
    assert machine.keep() is False


@pytest.mark.parametrize(
    ("before", "within"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_children_ask_for_large_pages_unless_something_was_chosen(before, within, monkeypatch):
    if before is None:
        monkeypatch.delenv(machine.TUNABLES, raising=False)
    else:
        monkeypatch.setenv(machine.TUNABLES, before)
    with machine.large_pages():
        asked = [sys.executable, "-c", f"import os; print(os.environ[{machine.TUNABLES!r}])"]
        child = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == within
    assert os.environ.get(machine.TUNABLES) == before
