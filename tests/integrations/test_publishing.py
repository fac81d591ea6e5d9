"""What `push_to_hub` would publish: huggingface_hub's own client against a stand-in for the hub on this machine."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sordino import Budget
from sordino.accounting.ledger import Ledger
from sordino.accounting.pricing import epsilon

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-integrations")
from huggingface_hub import HfApi  # noqa: E402

from sordino.integrations.transformers import PrivateTrainer  # noqa: E402
from tests.finetuning.models import Texts, build, collate  # noqa: E402

DELTA = 1e-3
Hub = tuple[str, dict[str, bytes]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """The address of the stand-in, and the files that were committed to it."""
    files: dict[str, bytes] = {}

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.endswith("/repos/create"):
                self.answer({"url": f"{address}/somebody/model"})
            elif "/preupload/" in self.path:
                asked = json.loads(sent)["files"]
                self.answer(
                    {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
                )
            elif "/commit/" in self.path:
                lines = [json.loads(line) for line in sent.splitlines()]
                added = [line["value"] for line in lines if line["key"] == "file"]
                files.update({each["path"]: base64.b64decode(each["content"]) for each in added})
                self.answer({"commitUrl": f"{address}/somebody/model/commit/1", "commitOid": "1"})
            else:  # is the head of the card well-formed?
                self.answer({"errors": [], "warnings": []})

        def answer(self, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield address, files
    server.shutdown()
    server.server_close()


def test_what_is_pushed_states_the_guarantee_and_nothing_private(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, files = hub
    monkeypatch.setattr("transformers.utils.hub._hf_api", HfApi(endpoint=address))
    args = transformers.TrainingArguments(
        str(tmp_path / "out"), use_cpu=True, disable_tqdm=True, report_to="none", max_steps=3, save_steps=2,
        per_device_train_batch_size=6, push_to_hub=True, hub_model_id="somebody/model", hub_token="hf_stand_in",
        hub_strategy="end", eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    trainer = PrivateTrainer(
        model=build("gpt2"), args=args, train_dataset=Texts("gpt2"), data_collator=collate,
        eval_dataset=Texts("gpt2", 6, 9), budget=Budget(3, DELTA),
    )  # fmt: skip
    trainer.train()
    trainer.push_to_hub()
    assert {"README.md", "model.safetensors", "config.json", "sordino/ledger.sqlite"} <= set(files)
    assert not any(name.startswith("checkpoint-") or "rng" in name or "optimizer" in name for name in files)
    card = files["README.md"].decode()
    assert str(trainer.guarantee()) in card
    assert "held-out records are NOT protected" in card
    assert "train_loss" not in card
    assert "grad_norm" not in card
    (tmp_path / "downloaded.sqlite").write_bytes(files["sordino/ledger.sqlite"])
    with Ledger.read(tmp_path / "downloaded.sqlite") as ledger:
        assert len(ledger) == 3, "the ledger is whole, without its neighbours on disk"
        assert epsilon(ledger.events(), DELTA) == pytest.approx(trainer.guarantee().epsilon)
