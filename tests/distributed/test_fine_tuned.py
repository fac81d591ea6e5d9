"""A transformer from a configuration, sharded by FSDP2 over two processes, is trained as one process trains it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.crew import found

pytest.importorskip("transformers", reason="the models come from transformers (bench extra)")
pytest.importorskip("peft", reason="LoRA comes from peft (bench extra)")

pytestmark = pytest.mark.slow  # the sharded perceptrons of test_data_parallel.py are the fast version


@pytest.fixture(scope="module")
def crews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fine_tuned")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "tests.distributed.crew", str(root), "tests.distributed.fine_tuned"]
    result = subprocess.run(command, env=environment, timeout=1800, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return root


@pytest.mark.parametrize("what", ["full", "LoRA"])
def test_two_processes_train_what_one_trains(crews: Path, what: str) -> None:
    (alone,) = found(crews / "1", "fine_tuned")
    for rank in found(crews / "2", "fine_tuned"):
        torch.testing.assert_close(rank[what], alone[what], rtol=1e-5, atol=1e-5)


def test_float32_shards_that_are_computed_in_bfloat16(crews: Path) -> None:
    """The shards, the noise and Adam's state are float32; the ranks agree, and have gone where float32 went."""
    (alone,) = found(crews / "1", "fine_tuned")
    first, second = (rank["bfloat16"] for rank in found(crews / "2", "fine_tuned"))
    assert torch.equal(first, second)
    assert not torch.equal(first, first.bfloat16().double())
    assert float((first - alone["full"]).norm() / alone["full"].norm()) < 0.02
