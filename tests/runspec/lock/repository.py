"""Models in directories and in a Hugging Face cache."""

from __future__ import annotations

import json
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "76543210fedcba9876543210fedcba9876543210"


def write_model(
    folder: Path, *, template: str = "{{ messages }}", weights: bytes = b"1234"
) -> Path:
    """A model's directory with one tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    write_weights(folder / "model.safetensors", weights)
    return folder


def write_weights(path: Path, weights: bytes, name: str = "a") -> None:
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, len(weights)]}
    header = json.dumps({name: tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + weights)


def cache(home: Path, repository: str = "models--some--model", commit: str = COMMIT) -> Path:
    """The folder of a commit in a cache whose `main` it is."""
    folder = home / "hub" / repository
    reference = folder / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    return snapshot
