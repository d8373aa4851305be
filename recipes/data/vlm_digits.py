"""Write data and model directory of recipes/vlm_digits.yaml, or test a finished run on held-out digits.

    python recipes/data/vlm_digits.py write                     # runs/vlm_digits_data: pictures, records, model
    hyper-parallel train recipes/vlm_digits.yaml
    python recipes/data/vlm_digits.py check runs/vlm_digits     # the exported model answers for held-out pictures

The pictures are the 1,797 handwritten digits that ship with scikit-learn, of 8 x 8 pixels. Every fifth is held out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path("runs/vlm_digits_data")
QUESTION = "<image>which digit is this"
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def write() -> None:
    """Write pictures, records and a model directory without weights."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        from hyper_parallel.errors import MissingDependency

        raise MissingDependency(
            "the handwritten digits ship with the package `scikit-learn`",
            where=__file__,
            hint="pip install 'hyper-parallel[digits]'",
        ) from None
    from PIL import Image

    digits = load_digits()
    (FOLDER / "pictures").mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {"train": [], "holdout": []}
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        name = f"pictures/{number:04}.png"
        Image.fromarray((pixels * 15.9).astype("uint8")).save(FOLDER / name)
        asked = {"role": "user", "content": QUESTION}
        answer = {"role": "assistant", "content": WORDS[digit]}
        record = {"images": [name], "messages": [asked, answer]}
        lines["train" if number % 5 else "holdout"].append(json.dumps(record) + "\n")
    for split, records in lines.items():
        (FOLDER / f"{split}.jsonl").write_text("".join(records))
    _write_model(FOLDER / "model")
    print(f"{FOLDER}: {len(lines['train'])} pictures to train on, {len(lines['holdout'])} held out")


def _write_model(folder: Path) -> None:
    """Write config, tokenizer and processor of a small LLaVA, a vision transformer and a Llama, into a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessorPil,
        LlavaConfig,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    words = [*WORDS, "which", "digit", "is", "this", "user", "assistant"]
    names = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<image>"]
    vocabulary = {word: i for i, word in enumerate([*names, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>",
        extra_special_tokens={"image_token": "<image>", "start_token": "<|im_start|>"}, chat_template=TEMPLATE,
    )  # fmt: skip
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    vision = {
        **sizes,
        "model_type": "clip_vision_model",
        "image_size": 8,
        "patch_size": 2,
        "projection_dim": 64,
    }
    text = {
        **sizes, "model_type": "llama", "vocab_size": len(vocabulary), "max_position_embeddings": 64,
        "initializer_range": 0.05, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0,
    }  # fmt: skip
    config = LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=vocabulary["<image>"], vision_feature_layer=-1,
        vision_feature_select_strategy="default", architectures=["LlavaForConditionalGeneration"],
    )  # fmt: skip
    config.save_pretrained(folder)
    size = {"height": 8, "width": 8}
    images = CLIPImageProcessorPil(
        size=size, crop_size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor = LlavaProcessor(
        images, tokenizer, patch_size=2, num_additional_image_tokens=1, chat_template=TEMPLATE
    )
    processor.vision_feature_select_strategy = "default"
    processor.save_pretrained(folder)


def check(run: Path) -> float:
    """Return the fraction of held-out pictures whose digit the exported model names; print it with examples."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(run / "export").eval()
    processor: Any = AutoProcessor.from_pretrained(run / "export")
    records = [json.loads(line) for line in (FOLDER / "holdout.jsonl").read_text().splitlines()]
    right = 0
    for number, record in enumerate(records):
        image = Image.open(FOLDER / record["images"][0]).convert("RGB")
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "which digit is this"}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": parts}],
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
        with torch.no_grad():
            token = int(model(**inputs).logits[0, -1].argmax())
        answer, expected = processor.tokenizer.decode([token]), record["messages"][1]["content"]
        right += answer == expected
        if number < 8:
            print(f"{FOLDER / record['images'][0]}: {answer} (expected: {expected})")
    print(f"accuracy {right / len(records):.4f}: {right} of {len(records)} held-out pictures")
    return right / len(records)


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        check(Path(sys.argv[2]))
    else:
        write()
