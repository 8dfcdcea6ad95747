"""Models: where they come from, what they look like, and their text interface.

``load`` opens a model; ``resolve`` and ``pull`` only find or fetch the files. The forward pass lies
in :mod:`layby.models.transformer`.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """A model found and opened; its weights are read when they are asked for.

    Attributes:
        name: The name it is served under.
        fingerprint: Changes when the model's files do.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    fingerprint: str
    _read_weights: Callable[[torch.dtype], dict[str, torch.Tensor]]

    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Tensors on the CPU by Hugging Face's names; ``lm_head.weight`` is absent when tied.

        Raises:
            ModelError: They are damaged, or do not fit the configuration.
        """
        return self._read_weights(dtype)


def load(model: str, *, allow_download: bool = False) -> LoadedModel:
    """Find a model and open it.

    Args:
        model: A known name, a path or a hub name; see :func:`layby.models.hub.resolve`.
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

        def read_weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
            return gguf_model.read_weights(file, config, dtype=dtype)
    else:
        config = hf_directory.read_config(files.path)
        tokenizer = Tokenizer.from_directory(files.path)
        chat_template = ChatTemplate.from_directory(files.path)

        def read_weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
            return hf_directory.read_weights(files.path, config, dtype=dtype)

    return LoadedModel(
        files.name, config, tokenizer, chat_template, fingerprint(files), read_weights
    )
