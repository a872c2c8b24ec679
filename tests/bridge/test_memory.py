"""Peak memory: bounded by the largest tensor, whatever the model weighs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.safetensors_io import SINGLE_NAME
from bridge.shards import file_header
from bridge.versions import differences
from bridge.weight_map import hf_shapes
from runspec.core.models.family import parse_config

FIELDS = {
    "model_type": "llama",
    "vocab_size": 30_001,
    "hidden_size": 1024,
    "intermediate_size": 10_243,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}
COMMAND = """
import sys
from bridge.__main__ import main
assert main(sys.argv[1:]) == 0
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(lines["VmHWM"].split()[0]) * 1024)
"""


def peak_bytes(*arguments: object) -> int:
    """The most resident memory that a command ever had, interpreter and libraries included."""
    words = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of peak memory")
def test_import_and_export_hold_a_few_tensors_of_a_model(tmp_path: Path) -> None:
    # given a model of 640 MB whose largest tensor has 61 MB, as a sparse file: all zeros
    hf_dir, checkpoint, out = (tmp_path / name for name in ("hf", "params", "out"))
    shapes = dict(hf_shapes(parse_config(FIELDS, place="test")))
    sizes = [2 * math.prod(shape) for shape in shapes.values()]
    hf_dir.mkdir()
    (hf_dir / "config.json").write_text(json.dumps(FIELDS))
    with (hf_dir / SINGLE_NAME).open("xb") as file:
        header = file_header(shapes, "BF16", 2)
        file.write(header)
        file.truncate(len(header) + sum(sizes))
    bound = 2.5 * max(sizes) + 300e6
    assert sum(sizes) > 1.4 * bound
    # when it is imported and exported, then neither takes more than the bound
    assert peak_bytes("import", hf_dir, checkpoint) < bound
    assert peak_bytes("export", checkpoint, out) < bound
    assert differences(hf_dir, out) == []
