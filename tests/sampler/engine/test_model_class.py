"""The first engine on a machine starts no process that only looks at the model's class."""

from __future__ import annotations

from pathlib import Path

import pytest

from sampler.engine.arguments import look_at_class, prepare_environment


def test_vllm_knows_the_class_without_a_process_or_a_file_of_its_own(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_environment()
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.registry import ModelRegistry

    # given a machine on which no engine was ever started
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    started: list[object] = []
    monkeypatch.setattr(registry, "_run_in_subprocess", started.append)

    look_at_class(untied)

    found = ModelRegistry.models["Qwen2ForCausalLM"].inspect_model_cls()
    assert found.architecture == "Qwen2ForCausalLM" and found.is_text_generation_model
    assert not started and not list(tmp_path.iterdir())
