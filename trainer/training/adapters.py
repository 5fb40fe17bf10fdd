"""Adapters of peft, such as LoRA: their settings, and the plain weights of a model that is trained with an adapter.

An adapter is a small set of weights that is trained beside the frozen weights of a model. To merge an adapter is to add
its effect to the weights; the result are plain weights.

Invariants:
- Engines and the folder of a trained model get plain weights. So does the next stage of the training, which starts
  from this folder.
- The merging does not change the model in training: each adapted layer is copied, and the adapter is merged into the
  copy. So the frozen weights stay exact, however often weights are synced.
- A layer is merged when its weights are read from `MergedWeights`, and freed when the reader drops them. So the merged
  copies take the memory of one layer. Without sharding only the first rank merges. With sharding all ranks gather a
  layer together, and each merges it on its device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config import ConfigError, check_options, suggestion

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import Trainer

OWN_OPTIONS = frozenset({"task_type", "inference_mode", "base_model_name_or_path"})
"""The options of a peft config that `[model.peft]` must not set, because the trainer sets them itself."""


def peft_config(options: Mapping[str, Any], model: Path | str | None) -> PeftConfig | None:
    """Return the config for `options`, the table `[model.peft]`. None if the table is empty. The option `peft_type`
    names the kind of adapter. Without it the kind is LoRA.

    If `model` is given, the adapter is first added to a copy of this model that has no weights. This shows whether the
    adapter fits the model and can be merged.

    Raises `ConfigError` for an option that peft does not know, for an option that the trainer sets, and for an adapter
    that does not fit the model or cannot be merged.
    """
    if not options:
        return None
    try:
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING
    except ImportError:
        raise ConfigError("model.peft: peft is not installed; pip install peft, or remove the table") from None
    kinds = {str(kind.value): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if (name := str(options.get("peft_type", "LORA"))) not in kinds:
        raise ConfigError(f"model.peft: peft_type={name}: {suggestion(name, kinds)}")
    kind, known = kinds[name], {option.name for option in fields(kinds[name])}
    check_options("model.peft", options, OWN_OPTIONS, known, f"option of peft's {kind.__name__}")
    try:
        if model is not None:
            # peft changes the config that it gets, so the trial has a config of its own.
            _try_on_empty_model(kind(**options, task_type="CAUSAL_LM"), model)
        return kind(**options, task_type="CAUSAL_LM")
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.peft: {' '.join(str(error).split())}") from error


def _try_on_empty_model(config: PeftConfig, path: Path | str) -> None:
    """Raise `ValueError` if the adapter does not fit the model, or cannot be merged into its weights."""
    from peft import get_peft_model

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        plain, embeddings = model.state_dict(), [model.get_input_embeddings(), model.get_output_embeddings()]
        adapted = get_peft_model(model, config)
        merged = {} if config.is_prompt_learning else dict(MergedWeights(adapted, adapted.state_dict()))
    # peft replaces each layer that it adapts, so an adapted embedding is another object than before.
    has_adapted_embedding = [model.get_input_embeddings(), model.get_output_embeddings()] != embeddings
    if has_adapted_embedding or merged.keys() != plain.keys():
        raise ValueError("expected an adapter of linear layers that can be merged; change peft_type or target_modules")


def plain_weights(trainer: Trainer, dtype: torch.dtype | None = None) -> Mapping[str, torch.Tensor]:
    """Return the weights of a model in training, with its adapter merged. All ranks call this together.

    If the weights are sharded over the ranks, they are gathered, and only the first rank gets them. With `dtype` each
    rank rounds its part to it before that, on the device of the part. Without an adapter this gives the same bits as
    rounding the gathered weights, and half the bytes are sent. With an adapter nothing is rounded: the frozen weights
    are in their final dtype, and the merged ones get it.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights, is_adapted = model.state_dict(), hasattr(model, "peft_config")
    if not trainer.is_fsdp_enabled:
        return MergedWeights(model, weights) if is_adapted else weights
    parts = _GatheredWeights(weights, None if is_adapted else dtype)
    # Each rank gathers the weights in the same order, on its device. The first rank moves them to its machine's memory.
    gathered = (MergedWeights(model, parts) if is_adapted else parts).items()
    is_first = trainer.is_world_process_zero()
    return {name: weight.cpu() for name, weight in gathered if is_first}


def save_plain_model(trainer: Trainer, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write the model with `weights`, and its tokenizer. A library can load this model without peft."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    if isinstance(weights, MergedWeights):
        # All layers are merged at once, so the merged copies leave the device, which may have no memory for them.
        weights = {name: weight.cpu() for name, weight in weights.items()}
    base.save_pretrained(directory, state_dict=dict(weights))
    trainer.processing_class.save_pretrained(directory)


class _GatheredWeights(Mapping[str, torch.Tensor]):
    """The state dict `parts` of a sharded model. A tensor is gathered when it is read, so all ranks read the same
    tensors in the same order. With `dtype`, each rank rounds its part before that."""

    def __init__(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> None:
        self._parts, self._dtype = parts, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        part = self._parts[name]
        if not isinstance(part, DTensor):  # a buffer, which each rank has as a whole
            return part
        whole: torch.Tensor = part.to(self._dtype or part.dtype).full_tensor()
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


class MergedWeights(Mapping[str, torch.Tensor]):
    """The weights of a peft model with its adapters merged, under their names in the base model.

    `weights` is the state dict of the peft model. If the model is sharded, its tensors are the gathered ones.
    """

    def __init__(self, model: Any, weights: Mapping[str, torch.Tensor]) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        base = model.get_base_model()
        self._weights = weights
        self._prefix = next(f"{name}." for name, module in model.named_modules() if module is base)
        adapted = {name: layer for name, layer in base.named_modules() if isinstance(layer, BaseTunerLayer)}
        self._layers: dict[str, tuple[str, Any]] = {}
        """For each weight of an adapted layer: the name of the layer, and the layer."""
        self._names: list[str] = []
        for name in base.state_dict():
            path = next((path for path in adapted if name.startswith(f"{path}.")), None)
            if path is None:
                self._names.append(name)
            elif name.startswith(f"{path}.base_layer."):
                self._names.append(name.replace("base_layer.", "", 1))
                self._layers[self._names[-1]] = (path, adapted[path])

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._layers:
            return self._weights[self._prefix + name]
        path, layer = self._layers[name]
        copies = {
            id(parameter): torch.nn.Parameter(self._weights[f"{self._prefix}{path}.{key}"].clone(), requires_grad=False)
            for key, parameter in layer.named_parameters()
        }
        merged = copy.deepcopy(layer, copies)
        merged.merge()
        weight: torch.Tensor = merged.get_base_layer().state_dict()[name.removeprefix(f"{path}.")]
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
