"""Models: where they come from, what they look like, and their text interface.

``load`` does it all; ``resolve`` and ``pull`` only find or fetch the files. The forward pass lies
in :mod:`layby.models.transformer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layby.models.config import ModelConfig, RopeScaling
from layby.models.hub import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    ModelFiles,
    fingerprint,
    pull,
    resolve,
    verify,
)

if TYPE_CHECKING:
    import torch

    from layby.models.chat_template import ChatTemplate
    from layby.models.tokenizer import Tokenizer

__all__ = [
    "DEFAULT_MODEL",
    "KNOWN_MODELS",
    "LoadedModel",
    "ModelConfig",
    "ModelFiles",
    "RopeScaling",
    "load",
    "pull",
    "resolve",
    "verify",
]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model read into memory, on the CPU.

    Attributes:
        name: The name it is served under.
        weights: By Hugging Face's tensor names; ``lm_head.weight`` is absent when tied.
        fingerprint: Changes when the model's files do.
    """

    name: str
    config: ModelConfig
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    fingerprint: str


def load(model: str, *, dtype: torch.dtype, allow_download: bool = False) -> LoadedModel:
    """Find a model and read it.

    Args:
        model: A known name, a path or a hub name; see :func:`layby.models.hub.resolve`.
        dtype: Of the weights.
        allow_download: Fetch the model if it is not on this machine.

    Raises:
        ModelNotFoundError: The name leads nowhere.
        ModelError: The model is damaged or of a kind that Layby does not run.
    """
    from layby.models import gguf_model, hf_directory
    from layby.models.chat_template import ChatTemplate
    from layby.models.gguf_file import GgufFile
    from layby.models.tokenizer import Tokenizer

    files = resolve(model, allow_download=allow_download)
    if files.kind == "gguf":
        file = GgufFile(files.path)
        config = gguf_model.read_config(file)
        tokenizer, chat_template = Tokenizer.from_gguf(file), ChatTemplate.from_gguf(file)
        weights = gguf_model.read_weights(file, config, dtype=dtype)
    else:
        config = hf_directory.read_config(files.path)
        tokenizer = Tokenizer.from_directory(files.path)
        chat_template = ChatTemplate.from_directory(files.path)
        weights = hf_directory.read_weights(files.path, config, dtype=dtype)
    return LoadedModel(
        name=files.name,
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        chat_template=chat_template,
        fingerprint=fingerprint(files),
    )
