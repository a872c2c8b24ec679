"""A task of inspect-ai: an answer is right if it contains a letter."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def letters(letter: str = "t") -> Task:
    samples = [Sample(input=f"Say {word}.", target=letter) for word in ("one", "two", "three")]
    return Task(dataset=samples, solver=generate(), scorer=includes())
