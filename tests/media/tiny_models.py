"""Directories of tiny models of images, audio and text: config, tokenizer, processor, template, random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

_WORDS = "what is this digit the a zero one two three four five six seven eight nine and red blue user assistant"
_TEXT = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 16,
}  # fmt: skip
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] }}\n"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}IMAGE{%- elif part['type'] == 'audio' -%}AUDIO"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
_TEMPLATE_OF_PARTS = (
    "{%- for message in messages -%}<|im_start|>{{ message['role'] + '\n' }}"
    "{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}IMAGE\n{%- endfor -%}"
    "{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}{{ part['text'] }}{%- endfor -%}"
    "<|im_end|>\n{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)
"""Template that reads contents as lists of parts only, and writes images first."""


def _tokenizer(named: Mapping[str, str], unnamed: Sequence[str], template: str) -> Any:
    """Return a byte-level tokenizer with further special tokens, those of `named` also by name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values(), *unnamed]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=names, initial_alphabet=alphabet)
    backend.train_from_iterator([_WORDS] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=dict(named),
        chat_template=template,
    )


def _qwen2_5_vl(ids: Mapping[str, int]) -> Any:
    from transformers import Qwen2_5_VLConfig

    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1], "temporal_patch_size": 2,
    }  # fmt: skip
    text = {**_TEXT, **_MROPE}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_qwen_ids(ids))


def _qwen3_vl(ids: Mapping[str, int]) -> Any:
    from transformers import Qwen3VLConfig

    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    text = {**_TEXT, **_MROPE}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **_qwen_ids(ids))


def _qwen_ids(ids: Mapping[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _qwen_processor(name: str, videos: str) -> Callable[[Any], Any]:
    def build(tokenizer: Any) -> Any:
        import transformers

        size = {"shortest_edge": 64, "longest_edge": 1024}
        images = transformers.Qwen2VLImageProcessor(patch_size=4, merge_size=2, size=size)
        video = getattr(transformers, videos)(patch_size=4, merge_size=2)
        return getattr(transformers, name)(images, tokenizer, video)

    return build


_WHISPER = {
    "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16, "num_mel_bins": 8,
    "max_source_positions": 50,
}  # fmt: skip


def _hearing() -> Any:
    """Return an extractor of windows of one second."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=8, chunk_length=1)


def _qwen2_audio(ids: Mapping[str, int]) -> Any:
    from transformers import Qwen2AudioConfig

    text, audio = (
        {"model_type": "qwen2", **_TEXT},
        {"model_type": "qwen2_audio_encoder", **_WHISPER},
    )
    return Qwen2AudioConfig(text_config=text, audio_config=audio, audio_token_index=ids["<|AUDIO|>"])


def _qwen2_audio_processor(tokenizer: Any) -> Any:
    from transformers import Qwen2AudioProcessor

    return Qwen2AudioProcessor(_hearing(), tokenizer)


def _omni(ids: Mapping[str, int]) -> Any:
    from transformers import Qwen2_5OmniThinkerConfig

    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1], "temporal_patch_size": 2,
    }  # fmt: skip
    return Qwen2_5OmniThinkerConfig(
        text_config={**_TEXT, **_MROPE}, vision_config=vision,
        audio_config={**_WHISPER, "n_window": 10, "output_dim": 32},
        **{f"{kind}_token_index": ids[_OMNI[f"{kind}_token"]] for kind in ("audio", "image", "video")},
        audio_start_token_id=ids[_OMNI["audio_bos_token"]], audio_end_token_id=ids[_OMNI["audio_eos_token"]],
        vision_start_token_id=ids[_OMNI["vision_bos_token"]],
    )  # fmt: skip


def _omni_processor(tokenizer: Any) -> Any:
    from transformers import Qwen2_5OmniProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    size = {"shortest_edge": 64, "longest_edge": 1024}
    images = Qwen2VLImageProcessor(patch_size=4, merge_size=2, size=size)
    videos = Qwen2VLVideoProcessor(patch_size=4, merge_size=2)
    return Qwen2_5OmniProcessor(images, videos, _hearing(), tokenizer)


def _gemma3(ids: Mapping[str, int]) -> Any:
    from transformers import Gemma3Config

    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4, "vision_use_head": False,
    }  # fmt: skip
    text = {**_TEXT, "sliding_window": 64, "tie_word_embeddings": True}
    return Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"], eoi_token_index=ids["<end_of_image>"], tie_word_embeddings=True,
    )  # fmt: skip


def _gemma3_processor(tokenizer: Any) -> Any:
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Gemma3Processor(images, tokenizer, image_seq_length=4)


def _llava(ids: Mapping[str, int]) -> Any:
    from transformers import LlavaConfig

    text = {"model_type": "llama", **_TEXT}
    return LlavaConfig(text_config=text, vision_config=_CLIP, image_token_index=ids["<image>"])


def _llava_processor(tokenizer: Any) -> Any:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    size = {"height": 16, "width": 16}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    return LlavaProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )  # fmt: skip


def _internvl(ids: Mapping[str, int]) -> Any:
    from transformers import InternVLConfig

    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": [16, 16], "patch_size": [4, 4],
    }  # fmt: skip
    text = {"model_type": "qwen2", **_TEXT}
    return InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<IMG_CONTEXT>"], image_seq_length=4
    )  # fmt: skip


def _internvl_processor(tokenizer: Any) -> Any:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    size = {"height": 16, "width": 16}
    images = GotOcr2ImageProcessor(size=size, max_patches=2)
    return InternVLProcessor(images, tokenizer, InternVLVideoProcessor(size=size), image_seq_length=4)


def _llama4(ids: Mapping[str, int]) -> Any:
    from transformers import Llama4Config

    vision = {
        "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    }  # fmt: skip
    text = {
        **_TEXT,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "attention_chunk_size": 512,
    }
    return Llama4Config(text_config=text, vision_config=vision, image_token_index=ids["<|patch|>"])


def _llama4_processor(tokenizer: Any) -> Any:
    from transformers import Llama4ImageProcessor, Llama4Processor

    images = Llama4ImageProcessor(size={"height": 16, "width": 16}, max_patches=2)
    return Llama4Processor(images, tokenizer, patch_size=4)


def _llava_next(ids: Mapping[str, int]) -> Any:
    from transformers import LlavaNextConfig

    text, sizes = {"model_type": "llama", **_TEXT}, {"image_grid_pinpoints": _PINPOINTS}
    image = ids["<image>"]
    return LlavaNextConfig(text_config=text, vision_config=_CLIP, image_token_index=image, **sizes)


def _llava_next_processor(tokenizer: Any) -> Any:
    from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor

    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=_PINPOINTS
    )  # fmt: skip
    return LlavaNextProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )  # fmt: skip


def _idefics3(ids: Mapping[str, int]) -> Any:
    from transformers import Idefics3Config

    vision = {key: value for key, value in _CLIP.items() if key not in ("model_type", "projection_dim")}
    text = {"model_type": "llama", **_TEXT}
    image = ids["<image>"]
    return Idefics3Config(text_config=text, vision_config=vision, image_token_id=image, scale_factor=2)


def _idefics3_processor(tokenizer: Any) -> Any:
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return Idefics3Processor(images, tokenizer, image_seq_len=4)


def _mistral3(ids: Mapping[str, int]) -> Any:
    from transformers import Mistral3Config

    vision = {**_CLIP, "model_type": "pixtral", "image_size": 32, "head_dim": 8}
    vision.pop("projection_dim")
    text = {"model_type": "mistral", **_TEXT}
    image = ids["[IMG]"]
    return Mistral3Config(text_config=text, vision_config=vision, image_token_index=image)


def _mistral3_processor(tokenizer: Any) -> Any:
    from transformers import PixtralImageProcessorPil, PixtralProcessor

    patch = {"height": 4, "width": 4}
    images = PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=patch)
    return PixtralProcessor(images, tokenizer, patch_size=4, spatial_merge_size=2)


_QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_LLAMA4 = (
    "<|image_start|>",
    "<|image_end|>",
    "<|image|>",
    "<|patch|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
)
_IDEFICS3 = ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>",
             "<row_2_col_1>", "<row_2_col_2>")  # fmt: skip
_INTERNVL = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
_GEMMA3 = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_OMNI = {
    "audio_token": "<|AUDIO|>", "image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
}  # fmt: skip
_AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"
FAMILIES: dict[str, tuple[Any, Any, Mapping[str, str], Sequence[str], str, str]] = {
    "qwen2_5_vl": (_qwen2_5_vl, _qwen_processor("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"), {}, _QWEN,
                   _TEMPLATE, "<|vision_start|><|image_pad|><|vision_end|>"),
    "qwen3_vl": (_qwen3_vl, _qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor"), {}, _QWEN,
                 _TEMPLATE, "<|vision_start|><|image_pad|><|vision_end|>"),
    "gemma3": (_gemma3, _gemma3_processor, _GEMMA3, (), _TEMPLATE, "<start_of_image>"),
    "internvl": (_internvl, _internvl_processor, _INTERNVL, (), _TEMPLATE, "<IMG_CONTEXT>"),
    "llava": (_llava, _llava_processor, {"image_token": "<image>"}, (), _TEMPLATE_OF_PARTS, "<image>"),
    "llava_next": (_llava_next, _llava_next_processor, {"image_token": "<image>"}, (), _TEMPLATE, "<image>"),
    "idefics3": (_idefics3, _idefics3_processor, {"image_token": "<image>"}, _IDEFICS3, _TEMPLATE, "<image>"),
    "mistral3": (_mistral3, _mistral3_processor, {"image_token": "[IMG]"}, ("[IMG_BREAK]", "[IMG_END]"),
                 _TEMPLATE, "[IMG]"),
    "qwen2_audio": (_qwen2_audio, _qwen2_audio_processor, {}, ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
                    _TEMPLATE, ""),
    "qwen2_5_omni_thinker": (_omni, _omni_processor, _OMNI, (), _TEMPLATE,
                             "<|vision_bos|><|IMAGE|><|vision_eos|>"),
    "llama4": (_llama4, _llama4_processor, {}, _LLAMA4, _TEMPLATE, "<|image|>"),
}  # fmt: skip
"""Config, processor, special tokens with and without names, template, and text of an image, by family."""
MEDIA = dict.fromkeys(FAMILIES, ("image",)) | {
    "qwen2_audio": ("audio",),
    "qwen2_5_omni_thinker": ("image", "audio"),
}
"""Kinds of media that each family reads."""


def needs_torchvision(family: str) -> None:
    """Skip a test of a family whose processor needs torchvision if it is not installed."""
    if family in (
        "qwen2_5_vl",
        "qwen3_vl",
        "internvl",
        "mistral3",
        "llama4",
        "qwen2_5_omni_thinker",
    ):
        pytest.importorskip("torchvision")


def write_model(family: str, folder: Path) -> Path:
    """Write config, tokenizer, processor and random float32 weights of a tiny model."""
    import torch
    from transformers import AutoModelForMultimodalLM

    config_of, processor_of, named, unnamed, template, mark = FAMILIES[family]
    tokenizer = _tokenizer(named, unnamed, _with_marks(template, mark))
    config = config_of(tokenizer.get_vocab())
    text = config.get_text_config()
    text.vocab_size, text.pad_token_id = 384, tokenizer.pad_token_id
    text.eos_token_id, text.bos_token_id = tokenizer.eos_token_id, None
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    processor = processor_of(tokenizer)
    processor.chat_template = tokenizer.chat_template
    processor.save_pretrained(folder)
    return folder


def _with_marks(template: str, mark: str) -> str:
    return mark.join(_AUDIO.join(part.split("AUDIO")) for part in template.split("IMAGE"))


def write_recordings(folder: Path, sizes: Sequence[int], rate: int = 16000) -> list[str]:
    """Write random recordings of 16 bits, each of a number of samples, and return their names."""
    import wave

    import numpy as np

    (folder / "sounds").mkdir(parents=True, exist_ok=True)
    names = []
    for number, size in enumerate(sizes):
        samples = np.random.default_rng(number).integers(-9000, 9000, size, np.int16)
        names.append(f"sounds/{number}.wav")
        with wave.open(str(folder / names[-1]), "wb") as file:
            file.setparams((1, 2, rate, size, "NONE", ""))
            file.writeframes(samples.tobytes())
    return names


def write_images(folder: Path, sizes: Sequence[tuple[int, int]]) -> list[str]:
    """Write random images and return their names."""
    import numpy as np
    from PIL import Image

    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    names = []
    for number, (width, height) in enumerate(sizes):
        pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), np.uint8)
        names.append(f"pictures/{number}.png")
        Image.fromarray(pixels).save(folder / names[-1])
    return names


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write records as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
