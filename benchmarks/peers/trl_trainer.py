"""TRL's GRPOTrainer around a random Qwen2, on a CPU. Runs in TRL's environment."""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer


def make_trainer(
    shape: dict[str, Any], rewards: Any, *, prompts: int = 1, **settings: Any
) -> GRPOTrainer:
    """A trainer whose prompts are single words.

    Args:
        shape: of `Qwen2Config`; its token 0 is padding, 1 the end.
        rewards: a reward function of TRL.
        prompts: in the data set.
        settings: of `GRPOConfig`.
    """
    words = {f"w{i}": i for i in range(shape["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    config = Qwen2Config(**shape, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            report_to=[],
            gradient_checkpointing=False,
            **settings,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"w{3 + i}"} for i in range(prompts)]),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w2"
        ),
    )
