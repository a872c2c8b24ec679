"""Hugging Face directory -> Orbax checkpoint, streaming. Imports neither Orbax nor JAX."""

from __future__ import annotations

from pathlib import Path

from bridge.load import LeafReader
from bridge.model_files import MODEL_FOLDER, copy_model_files
from bridge.orbax_writer import write_leaf, write_metadata
from bridge.output import output_directory
from runspec.core.models.config import load_config


def import_model(hf_dir: Path, checkpoint: Path) -> None:
    """Writes a model as an Orbax checkpoint of its parameters, which appears by one rename.

    Memory: a few tensors, each of one layer. The config and the tokenizer go along, into the
    checkpoint's folder `MODEL_FOLDER`, which Orbax passes over.

    Args:
        hf_dir: Hugging Face directory, one safetensors file or several with an index.
        checkpoint: must not exist.

    Raises:
        UserError: unreadable files, tensors that are not the config's, disk full, or `checkpoint`
            exists.
    """
    reader = LeafReader(hf_dir, load_config(hf_dir))
    with output_directory(checkpoint) as folder:
        for path, entry in reader.entries.items():
            write_leaf(folder, entry, reader.dtype(path), reader.parts(path))
        write_metadata(folder, reader.entries)
        copy_model_files(hf_dir, folder / MODEL_FOLDER)
