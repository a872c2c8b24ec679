"""A taskset of verifiers: an answer is right if it contains a letter."""

import verifiers.v1 as vf

WORDS = ("one", "two", "three")


class LettersData(vf.TaskData):
    answer: str


class LettersTask(vf.Task[LettersData]):
    @vf.reward(weight=1.0)
    async def has_letter(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LettersConfig(vf.TasksetConfig):
    letter: str = "t"


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self) -> list[LettersTask]:
        rows = [LettersData(prompt=f"Say {word}.", answer=self.config.letter) for word in WORDS]
        return [LettersTask(row, self.config.task) for row in rows]


__all__ = ["LettersTaskset"]
