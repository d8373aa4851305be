"""A tiny model on disk, as Hugging Face lays it out, and what a refusal of it must say."""

import json
import struct

from hyper_parallel.model import spec_from_config

TINY = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
}


def write_config(directory, values=TINY):
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(values))
    return path


def write_weights(path, tensors):
    """A safetensors file of zeros: name to (dtype word, shape)."""
    width = {"F32": 4, "BF16": 2, "F16": 2}
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        size = width[dtype]
        for s in shape:
            size *= s
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))


def tensors_of(values, dtype="BF16"):
    spec = spec_from_config(values, name="t")
    return {name: (dtype, p.shape) for name, p in spec.named_params() if not p.tied_to}


def model_dir(tmp_path, values=TINY, change=None, dtype="BF16"):
    directory = tmp_path / "tiny"
    write_config(directory, values)
    tensors = tensors_of(values, dtype)
    write_weights(directory / "model.safetensors", {**tensors, **(change or {})})
    return directory


def check(error, code, *words):
    text = str(error.value)
    assert error.value.code == code
    assert error.value.hint
    for word in words:
        assert word in text
    return text
