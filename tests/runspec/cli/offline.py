"""What vLLM answers without a server; called with REQUEST and ANSWERS.

REQUEST is a JSON file {model, tokenizer, arguments of vllm.LLM, prompts, arguments of each
SamplingParams}. ANSWERS gets the output tokens, by parameters and prompt.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(request: Path, answers: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from sampler.engine.worker_extension import OneRank

    asked = json.loads(request.read_text())
    model = LLM(**asked["engine"], distributed_executor_backend=OneRank)
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    found = []
    for parameters in asked["sampling"]:
        outputs = model.generate(prompts, SamplingParams(**parameters), use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    answers.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
