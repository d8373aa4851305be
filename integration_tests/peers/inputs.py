"""Models, tokenizers and records that both sides read from the same files.

Everything is tiny and random: models of some thousand parameters in float64, a tokenizer whose tokens are the 256
bytes, and records in the formats of TRL's documentation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

Record = dict[str, Any]

END, PAD, USER, ASSISTANT, SYSTEM, TURN_END = (
    "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|turn_end|>",
)  # fmt: skip
VOCAB_SIZE: Final = 264

_HEADER = "{{ '<|' + m['role'] + '|>' }}"
_PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATES: Final = {
    # The template says which words are the assistant's, and an answer ends with the end-of-text token.
    "marked": "{% for m in messages %}" + _HEADER + "{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}" + _PROMPT,
    # The same tokens without the marks.
    "unmarked": "{% for m in messages %}" + _HEADER + "{{ m['content'] }}{% if m['role'] == 'assistant' %}"
    "{{ eos_token }}{% endif %}{% endfor %}" + _PROMPT,
    # Texts one after another, as TRL joins a prompt and its completion that are texts.
    "plain": "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}",
    # A line break follows the marker that ends a turn, as in ChatML.
    "line_break": "{% for m in messages %}" + _HEADER + "{{ m['content'] }}<|turn_end|>\n{% endfor %}" + _PROMPT,
}  # fmt: skip


def save_tokenizer(folder: Path, template: str) -> None:
    """Save a tokenizer of bytes with one of `TEMPLATES`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM, TURN_END],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATES[template]
    tokenizer.save_pretrained(folder)


_DENSE = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.1, "eos_token_id": 256, "pad_token_id": 257, "bos_token_id": None,
}  # fmt: skip
_MIXTURE = _DENSE | {
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": True,
}
_GPT2 = {
    "vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.1,
    "eos_token_id": 256, "pad_token_id": 257, "bos_token_id": None,
}  # fmt: skip
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", _DENSE),
    "llama with attention dropout": ("llama", _DENSE | {"attention_dropout": 0.1}),
    "qwen3, tied": ("qwen3", _DENSE | {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", _DENSE | {"sliding_window": 64}),
    "gemma2 with a short window": ("gemma2", _DENSE | {"sliding_window": 8}),
    "gpt2 with dropout": ("gpt2", _GPT2),  # 0.1 in three places, by default
    "gpt2 without dropout": ("gpt2", _GPT2 | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "mixtral": ("mixtral", _MIXTURE | {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", _MIXTURE | {"num_experts": 4, "moe_intermediate_size": 24}),
    "qwen3_moe, loss not asked for": (
        "qwen3_moe",
        _MIXTURE | {"num_experts": 4, "moe_intermediate_size": 24, "output_router_logits": False},
    ),
    "gpt_oss": (
        "gpt_oss",
        _MIXTURE | {"num_local_experts": 4, "router_aux_loss_coef": 0.0, "output_router_logits": False,
                    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    ),
}  # fmt: skip
"""Model type and values of its config, by the name that rows use. Values that a config does not know are left out."""


def save_model(folder: Path, name: str, *, scores: bool) -> None:
    """Save a model of `MODELS` with random weights, with a head of scores for reward models."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        set_seed,
    )

    model_type, values = MODELS[name]
    config = AutoConfig.for_model(model_type, **values, **({"num_labels": 1} if scores else {}))
    set_seed(0)
    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float64).double()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():  # biases and norms would all be 0 or 1
        if parameter.ndim == 1 or "bias" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += 0.05 * noise
    model.save_pretrained(folder)


def write_records(path: Path, records: list[Record]) -> None:
    """Write one record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _question(i: int) -> str:
    return f"{i}+{i % 3}" + "?" * (1 + i % 4)


def _good(i: int) -> str:
    return f"{i + i % 3}" + "!" * (i % 5)


def _bad(i: int) -> str:
    return f"no {i}" + "." * (1 + i % 2)


def _turns(i: int) -> list[dict[str, str]]:
    """A prompt of several turns."""
    return [_user(_question(i)), _assistant(_bad(i + 1)), _user(f"sure{'?' * (i % 3)}")]


def conversations(count: int) -> list[Record]:
    """Conversations of one to three exchanges, some with a system turn."""
    found = []
    for i in range(count):
        system = [{"role": "system", "content": "be brief"}] if i % 3 == 0 else []
        turns = [t for j in range(1 + i % 3) for t in (_user(_question(i + j)), _assistant(_good(i + j)))]
        found.append({"messages": [*system, *turns]})
    return found


def texts(count: int) -> list[Record]:
    """Plain texts of different lengths."""
    return [{"text": f"{_question(i)} {_good(i)} " * (1 + i % 4)} for i in range(count)]


def prompts_with_completions(count: int) -> list[Record]:
    """Prompts of one turn and their completions."""
    return [{"prompt": [_user(_question(i))], "completion": [_assistant(_good(i))]} for i in range(count)]


def long_prompts_with_completions(count: int) -> list[Record]:
    """Prompts with an earlier turn of the assistant, and their completions."""
    return [{"prompt": _turns(i), "completion": [_assistant(_good(i))]} for i in range(count)]


def text_completions(count: int) -> list[Record]:
    """Prompts and completions that are texts."""
    return [{"prompt": _question(i), "completion": _good(i)} for i in range(count)]


def even_text_completions(count: int) -> list[Record]:
    """Prompts that are texts of one length, and completions."""
    return [{"prompt": f"{i}+{i % 3}?", "completion": _good(i)} for i in range(count)]


def pairs(count: int) -> list[Record]:
    """Two answers to a prompt of one turn."""
    return [
        {"prompt": [_user(_question(i))], "chosen": [_assistant(_good(i))], "rejected": [_assistant(_bad(i))]}
        for i in range(count)
    ]  # fmt: skip


def text_pairs(count: int) -> list[Record]:
    """Two answers to a prompt, all of them texts."""
    return [{"prompt": _question(i), "chosen": _good(i), "rejected": _bad(i)} for i in range(count)]


def long_prompt_pairs(count: int) -> list[Record]:
    """Two answers to a prompt of several turns."""
    return [
        {"prompt": _turns(i), "chosen": [_assistant(_good(i))], "rejected": [_assistant(_bad(i))]}
        for i in range(count)
    ]  # fmt: skip


def long_answer_pairs(count: int) -> list[Record]:
    """Two answers of several turns to a prompt of one turn, apart in the last turn only."""
    return [
        {
            "prompt": [_user(_question(i))],
            "chosen": [_assistant("hm"), _user("so?"), _assistant(_good(i))],
            "rejected": [_assistant("hm"), _user("so?"), _assistant(_bad(i))],
        }
        for i in range(count)
    ]


def implicit_pairs(count: int) -> list[Record]:
    """Two whole conversations that are apart in their last turn."""
    return [
        {"chosen": [*_turns(i), _assistant(_good(i))], "rejected": [*_turns(i), _assistant(_bad(i))]}
        for i in range(count)
    ]  # fmt: skip


def early_apart_pairs(count: int) -> list[Record]:
    """Two whole conversations that are apart from the first answer on."""
    return [
        {
            "chosen": [
                _user(_question(i)),
                _assistant(_good(i)),
                _user("so?"),
                _assistant(_good(i + 1)),
            ],
            "rejected": [
                _user(_question(i)),
                _assistant(_bad(i)),
                _user("so?"),
                _assistant(_bad(i + 1)),
            ],
        }
        for i in range(count)
    ]


def pairs_with_margin(count: int) -> list[Record]:
    """Pairs that say by how much the chosen answer is better."""
    return [pair | {"margin": 0.25 * (i % 4) + 0.1} for i, pair in enumerate(pairs(count))]


def answers(count: int) -> list[Record]:
    """Answers that are each good or bad, one of eight bad: with more of these the KL term is 0."""
    return [
        {
            "prompt": [_user(_question(i))],
            "completion": [_assistant(_bad(i) if i % 8 == 3 else _good(i))],
            "label": i % 8 != 3,
        }
        for i in range(count)
    ]


def long_prompt_answers(count: int) -> list[Record]:
    """Answers to prompts of several turns that are each good or bad."""
    return [record | {"prompt": _turns(i)} for i, record in enumerate(answers(count))]


Records = Callable[[int], list[Record]]
