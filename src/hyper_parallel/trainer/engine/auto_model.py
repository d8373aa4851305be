"""Construction of a transformers model from a config."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import nn

from hyper_parallel.backends.torch.token_scores import score_every_token
from hyper_parallel.errors import ModelUnreadable
from hyper_parallel.model import ConfigFile

_MISSING_OUTPUTS: Final = {
    # In transformers 5.24 this class raises AttributeError when it reads `image_outputs`.
    "Llama4ForConditionalGeneration": ("language_model", "image_outputs")
}
"""(submodule, attribute) by model class. The model reads the attribute from the submodule's output, which lacks it."""


def model_from_config(
    file: ConfigFile,
    dtype: torch.dtype,
    attention: str | None = None,
    *,
    trusted: bool = False,
    scores: bool = False,
    device: str = "meta",
) -> nn.Module:
    """Build a transformers model from a config.

    Args:
        file: Config of the model.
        dtype: Dtype of the parameters.
        attention: `attn_implementation` of transformers; None: the default of transformers.
        trusted: Permission to run model code in the config's directory. Only model types unknown to transformers need
            this permission.
        scores: Whether to build a sequence classifier with one label that scores every token, not a language model.
        device: `meta` for parameters without storage, or `cpu` for random parameters.

    Raises:
        ModelUnreadable: HP305 when transformers cannot build the model.
    """
    family = file.values.get("model_type")
    trusted = _runs_own_code(file, trusted)
    kind = "sequence classifier" if scores else "language model"
    auto = _auto_class(file, trusted=trusted, scores=scores)
    try:
        config = _transformers_config(file, trusted=trusted)
        if scores:
            config.num_labels = 1
        with torch.device(device):
            options = {"dtype": dtype, "attn_implementation": attention}
            model: nn.Module = (
                auto.from_config(config, trust_remote_code=trusted, **options)
                if hasattr(auto, "from_config")
                else auto._from_config(config, **options)
            )
    except Exception as error:
        # transformers raises many error classes: for config keys, unknown attention or an unsupported model.
        is_attention_error = attention not in (None, "eager") and "attn_implementation" in str(error)
        raise ModelUnreadable(
            f"transformers cannot build a {kind} from this `{family}` config",
            where=file.where,
            got=(str(error).splitlines() or [type(error).__name__])[0][:200],
            hint="set `model.attn_implementation=eager`" if is_attention_error else None,
        ) from error
    if scores:
        score_every_token(model)
    complete_outputs(model)
    return model


def complete_outputs(model: nn.Module) -> None:
    """Work around transformers models that read an attribute missing from a submodule's output.

    A forward hook on the submodule sets the attribute to None. Only the classes in `_MISSING_OUTPUTS` get the hook.
    """
    if (missing := _MISSING_OUTPUTS.get(type(model).__name__)) is not None:
        module, name = missing
        model.get_submodule(module).register_forward_hook(partial(_complete, name))


def _complete(name: str, module: nn.Module, args: object, output: Any) -> None:
    if not hasattr(output, name):
        setattr(output, name, None)


def _runs_own_code(file: ConfigFile, trusted: bool) -> bool:
    """Return whether to run model code in the config's directory.

    Raise HP305 for a type that transformers does not know, if the directory has no code or the code is not trusted.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = file.values.get("model_type")
    own_code = family not in CONFIG_MAPPING and "auto_map" in file.values and file.directory is not None
    trusted = trusted and own_code
    if family not in CONFIG_MAPPING and not trusted:
        raise ModelUnreadable(
            "transformers has no model of this type"
            + (", and `model.trust_remote_code` does not permit the Python code in its directory" if own_code else ""),
            where=f"{file.where}: model_type",
            got=family,
            hint="set `model.trust_remote_code=true` in the recipe, or pass --trust-remote-code" if own_code else None,
        )
    return trusted


def _auto_class(file: ConfigFile, *, trusted: bool, scores: bool) -> Any:
    """Return the class that builds the model: an auto class, or a model class if no auto class lists the type."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if scores:
        return AutoModelForSequenceClassification
    return AutoModelForCausalLM if trusted else class_of_config(file)


def _transformers_config(file: ConfigFile, *, trusted: bool) -> Any:
    """Return the config object; with `trusted`, code in the config's directory defines the class of the object."""
    from transformers import AutoConfig

    if not trusted:
        return AutoConfig.for_model(**file.values)
    stored = AutoConfig.from_pretrained(str(file.directory), trust_remote_code=True)
    config = type(stored).from_dict(dict(file.values))  # a reduced copy has smaller sizes
    config.name_or_path = stored.name_or_path
    return config


def class_of_config(file: ConfigFile) -> Any:
    """Return the auto or model class of transformers for a causal language model, which may also read media.

    If transformers has several classes for the model type, for example with and without images, the config's
    `architectures` selects a class. If the auto classes of transformers do not list the type, `architectures` must
    name the class.

    Raises:
        ModelUnreadable: HP305 when transformers has no language model of this type.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family: str = file.values["model_type"]
    # The mapping also lists audio models that only have a decoder.
    is_encoder_decoder = family in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and getattr(
        CONFIG_MAPPING[family], "is_encoder_decoder", True
    )
    name = (file.values.get("architectures") or [""])[0]
    tables = {
        "AutoModelForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForImageTextToText": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "AutoModelForMultimodalLM": auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    fitting = [
        auto_name
        for auto_name, names in tables.items()
        if family in names and (auto_name == "AutoModelForCausalLM" or not is_encoder_decoder)
    ]
    named = [auto_name for auto_name in fitting if tables[auto_name][family] == name]
    if fitting:
        return getattr(transformers, (named or fitting)[0])
    if name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        cls = getattr(transformers, name)
        if cls.config_class.model_type == family:
            return cls
    raise ModelUnreadable(
        f"`{family}` is {'an encoder-decoder' if is_encoder_decoder else 'no language'} model",
        where=f"{file.where}: model_type",
        got=family,
        allowed="causal language models, and models of images, audio and text",
        hint="use a causal language model, such as Qwen/Qwen3-0.6B",
    )
