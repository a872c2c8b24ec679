"""TRL's GRPOTrainer around a random Qwen2, on a CPU. Runs in TRL's environment."""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer


def random_model(shape: dict[str, Any]) -> Qwen2ForCausalLM:
    """Qwen2 with random weights; `shape` of `Qwen2Config`."""
    return Qwen2ForCausalLM(Qwen2Config(**shape))


def cpu_config(**settings: Any) -> GRPOConfig:
    """In float32, reporting to nobody; `settings` of `GRPOConfig`."""
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        **settings,
    )


def make_trainer(
    model: Qwen2ForCausalLM, rewards: Any, *, prompts: int = 1, **settings: Any
) -> GRPOTrainer:
    """A trainer whose prompts are single words.

    Args:
        model: its token 0 is padding, 1 the end.
        rewards: a reward function of TRL.
        prompts: in the data set.
        settings: of `GRPOConfig`.
    """
    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=cpu_config(**settings),
        train_dataset=Dataset.from_list([{"prompt": f"w{3 + i}"} for i in range(prompts)]),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w2"
        ),
    )
