"""The policy, how it starts, and the problems it is trained on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from runspec.core.spec.fields import (
    RESTART,
    Block,
    Count,
    CountOrZero,
    Duration,
    Name,
    NonNegative,
    Positive,
    Share,
    Tokens,
    Unit,
    Updates,
)


class ModelShape(Block):
    """Shape of a model that the run makes itself, in the words of a Hugging Face config.json."""

    model_type: Literal["qwen2", "qwen3", "llama", "mistral"]
    """Architecture: qwen2 has biases on q, k and v, qwen3 norms on q and k."""
    vocab_size: Annotated[Count, Unit("tokens")]
    """Rows of the embedding and of the output head."""
    hidden_size: Annotated[Count, Unit("features")]
    """Width of the residual stream."""
    intermediate_size: Annotated[Count, Unit("features")]
    """Width of the MLP."""
    num_hidden_layers: Annotated[Count, Unit("layers")]
    """Decoder layers."""
    num_attention_heads: Annotated[Count, Unit("heads")]
    """Query heads."""
    num_key_value_heads: Annotated[Count, Unit("heads")]
    """Key and value heads; each serves an equal share of the query heads."""
    head_dim: Annotated[Count | None, Unit("features")] = None
    """Size of a head; hidden_size / num_attention_heads when null."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: Positive = 1e-6
    """Added to the mean square in every norm."""
    tie_word_embeddings: bool = False
    """Whether the output head is the embedding."""


class Tokenizer(Block):
    """Another tokenizer than the model's own; it must be of the model's vocabulary."""

    hf: str
    """Hugging Face repository, or a local directory, with tokenizer.json."""
    revision: str | None = None
    """Commit of the repository."""


class Model(Block):
    """The policy: a Hugging Face model, or a shape whose weights the warm start makes."""

    hf: str | None = None
    """Hugging Face repository or a local directory."""
    revision: str | None = None
    """Commit of the repository."""
    shape: ModelShape | None = None
    """Shape of a model made from nothing; exactly one of `hf` and `shape`."""
    max_context: Tokens
    """Longest sequence that the model's positions cover."""
    tokenizer: Tokenizer | None = None
    """Every role takes the tokenizer and chat template from the policy version; null: they are
    the model's own."""


class WarmStart(Block):
    """Supervised steps on generated traces, before version 0 exists. Cached by digest."""

    lr: Positive = 3e-3
    """Learning rate after the warm-up."""
    beta2: Share = 0.98
    """Decay of the mean of squared gradients."""
    clip_norm: Positive = 1.0
    """Largest global gradient norm."""
    warmup_updates: Annotated[CountOrZero, Unit("optimizer updates")] = 30
    """The learning rate grows linearly over these."""
    max_updates: Updates = 600
    """A start that has not reached its mark after these is an error."""
    sequences: Annotated[Count, Unit("traces")] = 64
    """Traces an update."""
    answer_weight: Positive = 5.0
    """Loss weight of the answer's tokens; the thinking weighs 1."""
    obey_share: Share = 0.3
    """Share of traces whose length is the one asked for."""
    stop_answer_probability: Share = 0.3
    """Stops once the held-out teacher-forced probability of the answer reaches this."""
    evaluate_every: Updates = 10
    """Updates between looks at the held-out traces."""


class SolveRate(Block):
    """Offline filter: keeps problems whose recorded solve rate lies in [min, max]."""

    field: str
    """Column of the solve rate."""
    min: Share = 0.0
    """Least rate kept."""
    max: Share = 1.0
    """Largest rate kept."""


class Source(Block):
    """Where problems or documents come from."""

    name: Name
    """Names the source in findings and overlays."""
    kind: str
    """Problems: `jsonl`, `parquet`, `hf_dataset`, `gsm8k`, `livecodebench`, `reasoning_gym`, or a
    source that an installed package offers. Documents: `text`, `jsonl`, `parquet`, `fasta` or
    `fastq`, each plain or compressed by gzip, or `generated_reads`."""
    uri: str | None = None
    """Where the rows lie, for kinds that read files: a file, a folder or a pattern such as
    `train-*.parquet`; relative to the spec."""
    revision: str | None = None
    """Commit of the data's repository, where `uri` names one."""
    dataset: str | None = None
    """The generator's name, for `reasoning_gym`."""
    params: dict[str, int | float | str | bool | dict[str, str]] = {}
    """The generator's parameters; of kinds that read rows the columns `problem_id`, `task_type`,
    `prompt` and `verification_info`, where they have other names, an object of columns as
    `verification_info`, `type` and `instruction` of all rows, and the `split` of a `hf_dataset`.
    Of documents: the columns `text`, `messages` or `tokens`; the `id_offset` that is added to
    `tokens`; `whole: true` where a text file is one document. Of `generated_reads` `organisms`,
    `reads`, `length` and `seed`."""
    task_types: dict[str, str] = {}
    """Reward kinds by the task types that the rows say, where the two differ."""
    size: Annotated[Count, Unit("problems")] | None = None
    """How many problems a generator makes."""
    solve_rate: SolveRate | None = None
    """Offline filter by recorded solve rate."""
    train: bool = True
    """For `grpo`: whether the run trains on its problems; at false only evaluations ask them."""
    weight: Positive = 1.0
    """For `pretrain` and `sft`: weight of each of its tokens in the loss."""


class Data(Block):
    """Problems, and how they are put to the policy; or documents."""

    max_prompt_tokens: Tokens = 2048
    """Longer prompts are left out, everywhere the same."""
    length_prompt: str = "Think for {target} tokens before giving a response."
    """Appended to the problem; `{target}` is the target length in tokens."""
    length_prompt_role: Literal["user", "system"] = "user"
    """Message that says the length: the problem's own, or the system's."""
    system_prompt: str | None = None
    """Text of the system's message, before the length prompt where that is there too."""
    thinking: Literal["required", "optional", "none"] | None = None
    """What of an output is graded: `required` what follows its first `</think>`, and nothing
    without one; `optional` the same, or all of it without one; `none` all of it. Null takes
    `required` where the chat template or a prompt of `data` knows `<think>`, else `none`; `apply`
    writes down which. The length always counts all output tokens."""
    think_prefill: bool = False
    """Ends the prompt with `<think>` and a line break where the chat template does not open the
    thinking itself."""
    sources: list[Source] = Field(min_length=1)
    """Merged by name over the layers."""


class Reward(Block):
    """One term of the reward, a plug-in by `kind`."""

    name: Name
    """Names the term in findings and overlays."""
    kind: str
    """`reasoning_gym`, `math`, `code`, `target_length` or what an installed package offers."""
    timeout: Annotated[Duration | None, RESTART] = None
    """Longest time that grading one answer may take; null takes the kind's own: 60 s for `code`,
    else 10 s."""
    sandboxed: Annotated[bool, RESTART] = True
    """Whether a grader that runs what the model wrote (`code`) must do so in a sandbox. At false
    it also runs on machines where none works, in runs whose pools are all trusted."""
    form: Literal["exact", "max", "clip"] | None = None
    """For `target_length`: how length enters the reward."""
    alpha: Annotated[NonNegative | None, Unit("reward a token")] = None
    """For `target_length`: reward lost a token of distance."""
    targets: list[Tokens] | None = None
    """For `target_length`: the lengths asked for, the end token included; one a group."""
