"""Rows of a Hugging Face dataset on disk, as `Dataset.save_to_disk` writes it.

A folder of Arrow IPC streams with `state.json`, which lists them; a `DatasetDict` is a folder of
such folders with `dataset_dict.json`. Read with pyarrow alone, out of mapped memory.
"""

from __future__ import annotations

from sampler.tasks.sources.file_source import FileSource


class HfDatasetSource(FileSource):
    """`kind: hf_dataset`: a folder that `save_to_disk` wrote; `params.split` of a `DatasetDict`."""

    form = "arrow"
