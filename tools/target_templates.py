"""Short chat templates with the markers and special behavior of published model families, for `targets.py`.

Special behavior includes default system turns, dates, merged turns, trimmed content, dropped history, reasoning blocks,
generation prompts with an open block, and end markers that only the next turn writes. In template sources, `@` stands
for the content of a turn. Line ends are written as expressions, because jinja drops a line end after a block.
"""

# ruff: noqa: E501 - lines of templates end where their turns do

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

TOOLS_LOST: Final = "does not write the tools"
CALL_LOST: Final = "does not write a tool call"
REASONING_LOST: Final = "drops the reasoning"
WORDS_LOST: Final = "words of a turn do not appear"
NO_MARKER: Final = "does not end an answer with a marker"
RAISES: Final = "rejects a conversation"
REWRITTEN: Final = "differently when more turns follow"


@dataclass(frozen=True)
class Family:
    """Chat template of a family, with facts that determine the targets independently of it.

    Attributes:
        template: Source of the template.
        start: Pattern of the text before an answer.
        end: Pattern of the marker that ends an answer.
        eos: End-of-text token.
        bos: Token at the beginning of a text.
        added: Special tokens in addition to the bracketed ones in `start`, `end` and the template.
        appended: End marker that only the next turn writes, and that training appends to a last answer.
        refused: Pattern that the error must match, by name of a conversation that the template cannot express.
        shape: `reasoning`: reasoning is part of the content. `text`: arguments of tool calls are texts.
    """

    template: str
    start: str
    end: str
    eos: str = "</s>"
    bos: str = "<s>"
    added: tuple[str, ...] = ()
    appended: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    shape: str = ""

    @property
    def tokens(self) -> list[str]:
        """Special tokens of the tokenizer."""
        found = re.findall(r"<\|[^|<>]+\|>|<\uff5c[^<>]+?\uff5c>|\[/?[A-Z_]+\]|\[\|\w+\|\]", self.template)
        found += [name for name in ("<think>", "</think>", "<tool_call>") if name in self.template]
        return sorted({*found, *self.added, self.eos, self.bos})


def written(template: str) -> str:
    """Return the jinja source of a template: `@` becomes the content of a turn, and line ends become expressions."""
    return template.replace("@", "{{ m['content'] }}").replace("\n", "{{ '\\n' }}")


def turns(
    user: str,
    assistant: str,
    header: str,
    *,
    system: str = "{{ raise_exception('no system turns') }}",
    tool: str = "{{ raise_exception('no turns of tools') }}",
    before: str = "",
    after: str = "",
    trim: bool = False,
) -> str:
    """Return a template that writes every turn by the text for its role, in order."""
    text = (
        before + "{% for m in messages %}{% if m['role'] == 'system' %}" + system
        + "{% elif m['role'] == 'user' %}" + user + "{% elif m['role'] == 'tool' %}" + tool
        + "{% elif m['role'] == 'assistant' %}" + assistant + "{% else %}{{ raise_exception('role') }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}" + header + "{% endif %}" + after
    )  # fmt: skip
    return written(text.replace("@", "{{ m['content'] | trim }}") if trim else text)


def chatml(
    assistant: str = "<|im_start|>assistant\n@<|im_end|>\n",
    header: str = "<|im_start|>assistant\n",
    **parts: Any,
) -> str:
    """Return a ChatML template, with turns between `<|im_start|>` and `<|im_end|>`."""
    system = "<|im_start|>system\n@<|im_end|>\n"
    parts = {"system": system, "tool": system.replace("system", "tool")} | parts
    return turns("<|im_start|>user\n@<|im_end|>\n", assistant, header, **parts)


_CALLS = (
    "{% for c in m['tool_calls'] or [] %}\n<tool_call>\n{\"name\": \"{{ c['function']['name'] }}\", \"arguments\": "
    "{{ c['function']['arguments'] | tojson }}}\n</tool_call>{% endfor %}"
)
_HERMES_CALLS = f"<|im_start|>assistant{{% if m['content'] %}}\n@{{% endif %}}{_CALLS}<|im_end|>\n"
_HERMES_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n"
    "{% endif %}# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0]['role'] == 'system' %}<|im_start|>system\n{{ messages[0]['content'] }}<|im_end|>\n{% endif %}"
)
_DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
)
_TOOL_IN_USER = (
    "{% if messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n@\n"
    "</tool_response>{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
)
_LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_SPLIT = (
    "{% set r = m['reasoning_content'] or '' %}{% set c = m['content'] or '' %}{% if not r and '</think>' in c %}"
    "{% set r = c.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
_QWEN3 = (
    _SPLIT + "<|im_start|>assistant\n{% if loop.index0 > ns.last and (loop.last or r) %}<think>\n{{ r.strip('\\n') }}\n"
    "</think>\n\n{{ c.lstrip('\\n') }}{% else %}{{ c }}{% endif %}"
    "{% for t in m['tool_calls'] or [] %}{% if c or not loop.first %}\n{% endif %}<tool_call>\n{\"name\": "
    "\"{{ t['function']['name'] }}\", \"arguments\": {{ t['function']['arguments'] | tojson }}}\n</tool_call>"
    "{% endfor %}<|im_end|>\n"
)  # fmt: skip
_QWEN3_CODER = (
    "<|im_start|>assistant\n@{% for c in m['tool_calls'] or [] %}<tool_call>\n<function={{ c['function']['name'] }}>\n"
    "{% for k, v in (c['function']['arguments'] or {}) | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n"
)
_IM_START, _IM_END = r"<\|im_start\|>assistant\n", r"<\|im_end\|>"
_NO_TOOLS: Final = {"tools": TOOLS_LOST}
_NO_REASONING: Final = {"reasoning": REASONING_LOST, "reasoning twice": REASONING_LOST}
_NEITHER: Final = _NO_TOOLS | _NO_REASONING
_NO_SYSTEM: Final = {"system": RAISES, "system, turns": RAISES}
_RAISES_FOR_TOOLS: Final = _NO_REASONING | {"tools": RAISES}
_HISTORY: Final = {"reasoning twice": REASONING_LOST}


def _of_chatml(template: str, refused: Mapping[str, str] = _NEITHER, start: str = _IM_START) -> Family:
    return Family(template, start, _IM_END, "<|im_end|>", refused=refused)


FAMILIES: Final[dict[str, Family]] = {
    "ChatML": _of_chatml(chatml()),
    "Hermes": _of_chatml(chatml(_HERMES_CALLS, before=_HERMES_TOOLS, system="", tool=_TOOL_IN_USER), _NO_REASONING),
    "Qwen 2": _of_chatml(chatml(before=_DEFAULT_SYSTEM)),
    "Qwen 2.5": _of_chatml(
        chatml(
            _HERMES_CALLS,
            before=_HERMES_TOOLS.replace("{% endif %}# T", "{% else %}You are Qwen.\n\n{% endif %}# T"),
            system="",
            tool=_TOOL_IN_USER,
        ),
        _NO_REASONING,
    ),
    "Qwen 3": _of_chatml(
        chatml(
            _QWEN3,
            before=_HERMES_TOOLS + _LAST_QUESTION,
            system="",
            tool=_TOOL_IN_USER,
            header="<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n"
            "</think>\n\n{% endif %}",
        ),
        _HISTORY,
    ),
    "Qwen 3 Thinking": _of_chatml(
        chatml(
            _QWEN3,
            before=_HERMES_TOOLS + _LAST_QUESTION,
            system="",
            tool=_TOOL_IN_USER,
            header="<|im_start|>assistant\n<think>\n",
        ),
        _HISTORY,
        start=_IM_START + "(?:<think>\n)?",
    ),
    "Qwen 3 Coder": _of_chatml(
        chatml(_QWEN3_CODER, before=_HERMES_TOOLS, system="", tool=_TOOL_IN_USER), _NO_REASONING
    ),
    "QwQ": _of_chatml(
        chatml(
            _HERMES_CALLS.replace("@", "{{ m['content'].split('</think>')[-1].lstrip('\\n') }}"),
            before=_HERMES_TOOLS,
            system="",
            tool=_TOOL_IN_USER,
            header="<|im_start|>assistant\n<think>\n",
        ),
        _NO_REASONING | {"inline reasoning": REASONING_LOST},
    ),
    "InternLM 2": _of_chatml(chatml(before="{{ bos_token }}")),
    "SmolLM 3": _of_chatml(
        chatml(
            "<|im_start|>assistant\n{{ m['content'].lstrip('\\n') }}<|im_end|>\n",
            before="<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: "
            "{{ strftime_now('%d %B %Y') }}\nReasoning Mode: /think\n\n## Custom Instructions\n\n{% if messages[0]['role']"
            " == 'system' %}{{ messages[0]['content'] }}{% else %}You are SmolLM.{% endif %}\n\n{% if tools %}<tools>"
            "{{ tools | tojson }}</tools>{% endif %}<|im_end|>\n",
            system="",
        ),
        _NO_REASONING | {"tools": CALL_LOST},
    ),
    "LFM 2": _of_chatml(
        chatml(
            before="{{ bos_token }}{% if tools %}<|im_start|>system\nList of tools: <|tool_list_start|>{{ tools | tojson }}"
            "<|tool_list_end|><|im_end|>\n{% endif %}",
            tool="<|im_start|>tool\n<|tool_response_start|>@<|tool_response_end|><|im_end|>\n",
        ),
        _NO_REASONING | {"tools": CALL_LOST},
    ),
    "Phi 4": Family(
        turns(
            "<|im_start|>user<|im_sep|>@<|im_end|>",
            "<|im_start|>assistant<|im_sep|>@<|im_end|>",
            "<|im_start|>assistant<|im_sep|>",
            system="<|im_start|>system<|im_sep|>@<|im_end|>",
        ),
        r"<\|im_start\|>assistant<\|im_sep\|>",
        _IM_END,
        "<|im_end|>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Phi 3": Family(
        turns(
            "<|user|>\n@<|end|>\n",
            "<|assistant|>\n@<|end|>\n",
            "<|assistant|>\n",
            system="<|system|>\n@<|end|>\n",
            after="{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        ),
        r"<\|assistant\|>\n",
        r"<\|end\|>",
        "<|endoftext|>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Phi 4 mini": Family(
        turns(
            "<|user|>@<|end|>",
            "<|assistant|>@{% if m['tool_calls'] %}<|tool_call|>{{ m['tool_calls'] | tojson }}<|/tool_call|>{% endif %}"
            "<|end|>",
            "<|assistant|>",
            before="{% if tools and messages[0]['role'] != 'system' %}<|system|><|tool|>{{ tools | tojson }}<|/tool|>"
            "<|end|>{% endif %}",
            system="<|system|>@{% if tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}<|end|>",
            tool="<|tool_response|>@<|end|>",
            after="{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        ),
        r"<\|assistant\|>",
        r"<\|end\|>",
        "<|endoftext|>",
        refused=_NO_REASONING,
    ),
    "Llama 2": Family(
        turns(
            "{{ bos_token }}[INST] {% if loop.index0 < 2 and messages[0]['role'] == 'system' %}<<SYS>>\n"
            "{{ messages[0]['content'] }}\n<</SYS>>\n\n{% endif %}@ [/INST]",
            " @ {{ eos_token }}",
            "",
            system="",
            trim=True,
        ),
        r"\[/INST\]",
        "</s>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Llama 3": Family(
        turns(
            "<|start_header_id|>user<|end_header_id|>\n\n@<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n@<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            system="<|start_header_id|>system<|end_header_id|>\n\n@<|eot_id|>",
            before="{{ bos_token }}",
            trim=True,
        ),
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",
        r"<\|eot_id\|>",
        "<|eot_id|>",
        "<|begin_of_text|>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Llama 3.1": Family(
        turns(
            "<|start_header_id|>user<|end_header_id|>\n\n{% if tools and loop.index0 == (1 if messages[0]['role'] == "
            "'system' else 0) %}Given the following functions, respond with JSON.\n\n{% for t in tools %}"
            "{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}@<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n{% if m['tool_calls'] %}{% set f = m['tool_calls'][0]"
            "['function'] %}{\"name\": \"{{ f['name'] }}\", \"parameters\": {{ f['arguments'] | tojson }}}"
            "{% else %}@{% endif %}<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            before="{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
            "Today Date: {{ strftime_now('%d %b %Y') }}\n\n{% if messages[0]['role'] == 'system' %}"
            "{{ messages[0]['content'] | trim }}{% endif %}<|eot_id|>",
            system="",
            tool="<|start_header_id|>ipython<|end_header_id|>\n\n{{ m['content'] | tojson }}<|eot_id|>",
            trim=True,
        ),
        r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",
        r"<\|eot_id\|>",
        "<|eot_id|>",
        "<|begin_of_text|>",
        refused=_NO_REASONING,
    ),
    "Llama 4": Family(
        turns(
            "<|header_start|>user<|header_end|>\n\n@<|eot|>",
            "<|header_start|>assistant<|header_end|>\n\n@<|eot|>",
            "<|header_start|>assistant<|header_end|>\n\n",
            system="<|header_start|>system<|header_end|>\n\n@<|eot|>",
            tool="<|header_start|>ipython<|header_end|>\n\n@<|eot|>",
            before="{{ bos_token }}",
        ),
        r"<\|header_start\|>assistant<\|header_end\|>\n\n",
        r"<\|eot\|>",
        "<|eot|>",
        "<|begin_of_text|>",
        refused=_NEITHER,
    ),
    "Mistral 0.1": Family(
        turns("[INST] @ [/INST]", "@{{ eos_token }}", "", before="{{ bos_token }}"),
        r"\[/INST\]",
        "</s>",
        refused=_RAISES_FOR_TOOLS | _NO_SYSTEM,
    ),
    "Mistral 0.3": Family(
        turns(
            "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
            "[INST] {% if loop.index0 == ns.last and messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n"
            "{% endif %}@[/INST]",
            "{% if m['tool_calls'] %}[TOOL_CALLS] [{% for c in m['tool_calls'] %}{\"name\": \"{{ c['function']['name'] }}\""
            ", \"arguments\": {{ c['function']['arguments'] | tojson }}{% if c['id'] | length != 9 %}"
            "{{ raise_exception('id') }}{% endif %}, \"id\": \"{{ c['id'] }}\"}{% endfor %}]{{ eos_token }}{% else %} "
            "{{ m['content'] | trim }}{{ eos_token }}{% endif %}",
            "",
            before="{{ bos_token }}" + _LAST_QUESTION,
            system="",
            tool='[TOOL_RESULTS] {"content": @, "call_id": "{{ m[\'tool_call_id\'] }}"}[/TOOL_RESULTS]',
        ),
        r"\[/INST\]|\[/TOOL_RESULTS\]",
        "</s>",
        refused=_NO_REASONING | {"system, turns": REWRITTEN},
    ),
    "Mistral Small 3": Family(
        turns(
            "[INST]@[/INST]",
            "@{{ eos_token }}",
            "",
            before="{{ bos_token }}{% if messages[0]['role'] != 'system' %}[SYSTEM_PROMPT]Today is "
            "{{ strftime_now('%Y-%m-%d') }}.[/SYSTEM_PROMPT]{% endif %}",
            system="[SYSTEM_PROMPT]@[/SYSTEM_PROMPT]",
        ),
        r"\[/INST\]",
        "</s>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Magistral": Family(
        turns(
            "[INST]@[/INST]",
            "{% if m['content'] is string %}@{% else %}{% for p in m['content'] %}{% if p['type'] == 'thinking' %}[THINK]"
            "{{ p['thinking'] }}[/THINK]{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{{ eos_token }}",
            "",
            before="{{ bos_token }}",
            system="[SYSTEM_PROMPT]@[/SYSTEM_PROMPT]",
        ),
        r"\[/INST\]",
        "</s>",
        refused={"tools": RAISES},
        shape="reasoning",
    ),
    "Gemma 2": Family(
        turns(
            "<start_of_turn>user\n@<end_of_turn>\n",
            "<start_of_turn>model\n@<end_of_turn>\n",
            "<start_of_turn>model\n",
            before="{{ bos_token }}",
            trim=True,
        ),
        "<start_of_turn>model\n",
        "<end_of_turn>",
        "<eos>",
        "<bos>",
        ("<start_of_turn>", "<end_of_turn>"),
        refused=_RAISES_FOR_TOOLS | _NO_SYSTEM,
    ),
    "Gemma 3": Family(
        turns(
            "<start_of_turn>user\n{% if messages[0]['role'] == 'system' and loop.index0 == 1 %}"
            "{{ messages[0]['content'] }}\n\n{% endif %}@<end_of_turn>\n",
            "<start_of_turn>model\n@<end_of_turn>\n",
            "<start_of_turn>model\n",
            before="{{ bos_token }}",
            system="",
            trim=True,
        ),
        "<start_of_turn>model\n",
        "<end_of_turn>",
        "<eos>",
        "<bos>",
        ("<start_of_turn>", "<end_of_turn>"),
        refused=_RAISES_FOR_TOOLS,
    ),
    "DeepSeek V2": Family(
        turns(
            "User: @\n\n",
            "Assistant: @{{ eos_token }}",
            "Assistant:",
            system="@\n\n",
            before="{{ bos_token }}",
        ),
        "Assistant:",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "DeepSeek V3": Family(
        turns(
            "<\uff5cUser\uff5c>@",
            "<\uff5cAssistant\uff5c>@{{ eos_token }}",
            "<\uff5cAssistant\uff5c>",
            system="",
            before="{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}@{% endif %}{% endfor %}",
        ),
        "<\uff5cAssistant\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "DeepSeek V3.1": Family(
        turns(
            "<\uff5cUser\uff5c>@",
            "<\uff5cAssistant\uff5c></think>@{{ eos_token }}",
            "<\uff5cAssistant\uff5c>{% if thinking %}<think>{% else %}</think>{% endif %}",
            system="@",
            before="{{ bos_token }}",
        ),
        "<\uff5cAssistant\uff5c></think>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "DeepSeek R1": Family(
        turns(
            "<\uff5cUser\uff5c>@",
            "<\uff5cAssistant\uff5c>{{ m['content'].split('</think>')[-1] }}{{ eos_token }}",
            "<\uff5cAssistant\uff5c><think>\n",
            system="@",
            before="{{ bos_token }}",
        ),
        "<\uff5cAssistant\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        refused=_RAISES_FOR_TOOLS | {"inline reasoning": REASONING_LOST},
    ),
    "DeepSeek Coder": Family(
        turns(
            "### Instruction:\n@\n",
            "### Response:\n@\n<|EOT|>\n",
            "### Response:",
            system="@\n",
            before="{{ bos_token }}",
        ),
        "### Response:",
        r"<\|EOT\|>",
        "<|EOT|>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "GLM 4": Family(
        turns(
            "<|user|>\n@",
            "<|assistant|>{% if m['tool_calls'] %}{% for c in m['tool_calls'] %}{{ c['function']['name'] }}\n"
            "{{ c['function']['arguments'] | tojson }}{% endfor %}{% else %}\n@{% endif %}",
            "<|assistant|>",
            before="[gMASK]<sop>{% if tools %}<|system|>\n# Tools{% for t in tools %}\n{{ t | tojson }}{% endfor %}"
            "{% endif %}",
            system="<|system|>\n@",
            tool="<|observation|>\n@",
        ),
        r"<\|assistant\|>",
        r"<\|user\|>|<\|observation\|>",
        "<|endoftext|>",
        added=("[gMASK]", "<sop>"),
        appended="<|user|>",
        refused=_NO_REASONING,
    ),
    "GLM 4.5": Family(
        turns(
            "<|user|>\n@",
            _SPLIT + "<|assistant|>{% if loop.index0 > ns.last and r %}\n<think>{{ r.strip() }}</think>{% else %}\n"
            "<think></think>{% endif %}{% if c.strip() %}\n{{ c.strip() }}{% endif %}{% for t in m['tool_calls'] or [] %}\n"
            "<tool_call>{{ t['function']['name'] }}\n{% for k, v in t['function']['arguments'].items() %}<arg_key>{{ k }}"
            "</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
            "{% endfor %}",
            "<|assistant|>",
            before="[gMASK]<sop>{% if tools %}<|system|>\n# Tools{% for t in tools %}\n{{ t | tojson }}{% endfor %}"
            "{% endif %}" + _LAST_QUESTION,
            system="<|system|>\n@",
            tool="<|observation|>\n<tool_response>\n@\n</tool_response>",
        ),
        r"<\|assistant\|>",
        r"<\|user\|>|<\|observation\|>",
        "<|endoftext|>",
        added=("[gMASK]", "<sop>"),
        appended="<|user|>",
        refused=_HISTORY,
    ),
    "gpt-oss": Family(
        turns(
            "<|start|>user<|message|>@<|end|>",
            "{% if m['tool_calls'] %}{% set f = m['tool_calls'][0]['function'] %}<|start|>assistant to=functions."
            "{{ f['name'] }}<|channel|>commentary json<|message|>{{ f['arguments'] | tojson }}<|call|>{% else %}"
            "{% if m['thinking'] and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m['thinking'] }}<|end|>"
            "{% endif %}<|start|>assistant<|channel|>final<|message|>@{% if loop.last and not add_generation_prompt %}"
            "<|return|>{% else %}<|end|>{% endif %}{% endif %}",
            "<|start|>assistant",
            before="<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}\n\n# Valid channels: analysis, "
            "commentary, final.<|end|>{% if tools or messages[0]['role'] == 'system' %}<|start|>developer<|message|>"
            "{% if messages[0]['role'] == 'system' %}# Instructions\n\n{{ messages[0]['content'] }}{% endif %}"
            "{% if tools %}# Tools\n\n{% for t in tools %}type {{ t['function']['name'] }} = () => any;\n{% endfor %}"
            "{% endif %}<|end|>{% endif %}",
            system="",
            tool="<|start|>functions.find to=assistant<|channel|>commentary<|message|>{{ m['content'] | tojson }}<|end|>",
        ),
        r"<\|start\|>assistant",
        r"<\|return\|>|<\|call\|>|<\|end\|>(?!<\|start\|>assistant<\|channel\|>final)",
        "<|return|>",
        "<|startoftext|>",
        refused=_HISTORY,
        shape="thinking",
    ),
    "Kimi K2": Family(
        turns(
            "<|im_user|>user<|im_middle|>@<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>@{% if m['tool_calls'] %}<|tool_calls_section_begin|>{% for c in "
            "m['tool_calls'] %}<|tool_call_begin|>{{ c['id'] }}<|tool_call_argument_begin|>"
            "{{ c['function']['arguments'] | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
            "<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
            before="{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
            "{% if messages[0]['role'] != 'system' %}<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{% endif %}",
            system="<|im_system|>system<|im_middle|>@<|im_end|>",
            tool="<|im_system|>tool<|im_middle|>## Return of {{ m['tool_call_id'] }}\n@<|im_end|>",
        ),
        r"<\|im_assistant\|>assistant<\|im_middle\|>",
        _IM_END,
        "<|im_end|>",
        refused=_NO_REASONING | {"tools": "writes the `id` of a tool call"},
    ),
    "Command R": Family(
        turns(
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>@<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>@<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>@<|END_OF_TURN_TOKEN|>",
            before="{{ bos_token }}",
            trim=True,
        ),
        r"<\|CHATBOT_TOKEN\|>",
        r"<\|END_OF_TURN_TOKEN\|>",
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Command A": Family(
        turns(
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>@<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% if m['reasoning_content'] %}<|START_THINKING|>"
            "{{ m['reasoning_content'] }}<|END_THINKING|>{% endif %}<|START_RESPONSE|>@<|END_RESPONSE|>"
            "<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>@<|END_OF_TURN_TOKEN|>",
            before="{{ bos_token }}",
        ),
        r"<\|CHATBOT_TOKEN\|>",
        r"<\|END_OF_TURN_TOKEN\|>",
        "<|END_OF_TURN_TOKEN|>",
        "<BOS_TOKEN>",
        refused={"tools": RAISES},
    ),
    "Granite 3": Family(
        turns(
            "<|start_of_role|>user<|end_of_role|>@<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>@{% if m['tool_calls'] %}<|tool_call|>{{ m['tool_calls'] | tojson }}"
            "{% endif %}<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
            before="<|start_of_role|>system<|end_of_role|>Knowledge Cutoff Date: April 2024.\nToday's Date: "
            "{{ strftime_now('%B %d, %Y') }}.\n{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
            "{% endif %}<|end_of_text|>\n{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}"
            "<|end_of_text|>\n{% endif %}",
            system="",
            tool="<|start_of_role|>tool_response<|end_of_role|>@<|end_of_text|>\n",
        ),
        r"<\|start_of_role\|>assistant<\|end_of_role\|>",
        r"<\|end_of_text\|>",
        "<|end_of_text|>",
        refused=_NO_REASONING,
    ),
    "Nemotron Mini": Family(
        turns(
            "<extra_id_1>User\n@\n",
            "<extra_id_1>Assistant\n@\n",
            "<extra_id_1>Assistant\n",
            system="<extra_id_0>System\n@\n\n",
            trim=True,
        ),
        "<extra_id_1>Assistant\n",
        "<extra_id_1>",
        added=("<extra_id_0>", "<extra_id_1>"),
        appended="<extra_id_1>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Nemotron Nano 2": Family(
        turns(
            "<SPECIAL_11>User\n@\n",
            "<SPECIAL_11>Assistant\n<think></think>{{ m['content'].split('</think>')[-1].strip() }}\n<SPECIAL_12>\n",
            "<SPECIAL_11>Assistant\n<think>\n",
            before="<SPECIAL_10>System\n{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}\n",
            system="",
        ),
        "<SPECIAL_11>Assistant\n<think></think>",
        "<SPECIAL_12>",
        "<SPECIAL_12>",
        added=("<SPECIAL_10>", "<SPECIAL_11>"),
        refused=_RAISES_FOR_TOOLS | {"inline reasoning": REASONING_LOST},
    ),
    "EXAONE": Family(
        turns(
            "[|user|]@\n",
            "[|assistant|]@{{ eos_token }}\n",
            "[|assistant|]",
            before="{% if messages[0]['role'] != 'system' %}[|system|][|endofturn|]\n{% endif %}",
            system="[|system|]@[|endofturn|]\n",
        ),
        r"\[\|assistant\|\]",
        r"\[\|endofturn\|\]",
        "[|endofturn|]",
        refused=_RAISES_FOR_TOOLS,
    ),
    "OLMo 2": Family(
        turns(
            "<|user|>\n@\n",
            "<|assistant|>\n@{{ eos_token }}{% if not loop.last %}\n{% endif %}",
            "<|assistant|>\n",
            system="<|system|>\n@\n",
            before="{{ bos_token }}",
        ),
        r"<\|assistant\|>\n",
        r"<\|endoftext\|>",
        "<|endoftext|>",
        "<|endoftext|>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Zephyr": Family(
        turns(
            "<|user|>\n@{{ eos_token }}\n",
            "<|assistant|>\n@{{ eos_token }}\n",
            "<|assistant|>\n",
            system="<|system|>\n@{{ eos_token }}\n",
        ),
        r"<\|assistant\|>\n",
        "</s>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Vicuna": Family(
        turns(
            "USER: @ ",
            "ASSISTANT: @{{ eos_token }}",
            "ASSISTANT:",
            system="@ ",
            before="{{ bos_token }}",
        ),
        "ASSISTANT:",
        "</s>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Alpaca": Family(
        turns(
            "### Instruction:\n@\n\n",
            "### Response:\n@{{ eos_token }}\n\n",
            "### Response:\n",
            system="@\n\n",
        ),
        "### Response:\n",
        "</s>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Falcon": Family(
        turns("User: @\n\n", "Falcon: @\n\n", "Falcon:", system="@\n\n", trim=True),
        "Falcon:",
        "</s>",
        refused=_RAISES_FOR_TOOLS
        | dict.fromkeys(
            (
                "one answer",
                "turns",
                "system",
                "system, turns",
                "white space",
                "weight",
                "inline reasoning",
            ),
            NO_MARKER,
        ),
    ),
    "OpenChat": Family(
        turns(
            "GPT4 Correct User: @<|end_of_turn|>",
            "GPT4 Correct Assistant: @<|end_of_turn|>",
            "GPT4 Correct Assistant:",
            system="@<|end_of_turn|>",
            before="{{ bos_token }}",
        ),
        "GPT4 Correct Assistant:",
        r"<\|end_of_turn\|>",
        "<|end_of_turn|>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Baichuan 2": Family(
        turns("<reserved_106>@", "<reserved_107>@", "<reserved_107>", system="@"),
        "<reserved_107>",
        "<reserved_106>",
        added=("<reserved_106>", "<reserved_107>"),
        appended="<reserved_106>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Hunyuan": Family(
        turns("<|startoftext|>@<|extra_0|>", "@<|eos|>", "", system="<|startoftext|>@<|extra_4|>"),
        r"<\|extra_0\|>",
        r"<\|eos\|>",
        "<|eos|>",
        "<|startoftext|>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "MiniMax M2": Family(
        turns(
            "]~b]user\n@[e~[\n",
            _SPLIT
            + "]~b]ai\n{% if r and loop.index0 > ns.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}[e~[\n",
            "]~b]ai\n<think>\n",
            before="]~!b[" + _LAST_QUESTION,
            system="]~b]system\n@[e~[\n",
        ),
        r"\]~b\]ai\n(?:<think>\n)?",
        r"\[e~\[",
        "[e~[",
        "]~!b[",
        added=("]~b]",),
        refused=_HISTORY | {"tools": RAISES},
    ),
    "Seed-OSS": Family(
        turns(
            "<seed:bos>user\n@<seed:eos>",
            "<seed:bos>assistant\n{% if m['reasoning_content'] %}<seed:think>{{ m['reasoning_content'] }}</seed:think>"
            "{% endif %}@<seed:eos>",
            "<seed:bos>assistant\n",
            system="<seed:bos>system\n@<seed:eos>",
        ),
        "<seed:bos>assistant\n",
        "<seed:eos>",
        "<seed:eos>",
        "<seed:bos>",
        ("<seed:think>", "</seed:think>"),
        refused={"tools": RAISES},
    ),
    "Jamba": Family(
        turns(
            "<|bom|><|user|> @<|eom|>",
            "<|bom|><|assistant|> @<|eom|>",
            "<|bom|><|assistant|>",
            system="<|bom|><|system|> @<|eom|>",
            before="{{ bos_token }}",
        ),
        r"<\|bom\|><\|assistant\|>",
        r"<\|eom\|>",
        "<|endoftext|>",
        "<|startoftext|>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "Ling": Family(
        turns(
            "<role>HUMAN</role>@<|role_end|>",
            f"<role>ASSISTANT</role>@{_CALLS}<|role_end|>",
            "<role>ASSISTANT</role>",
            before="{% if tools %}<role>SYSTEM</role># Tools{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|role_end|>"
            "{% endif %}",
            system="<role>SYSTEM</role>@<|role_end|>",
            tool="<role>OBSERVATION</role>\n<tool_response>\n@\n</tool_response><|role_end|>",
        ),
        "<role>ASSISTANT</role>",
        r"<\|role_end\|>",
        "<|role_end|>",
        added=("<role>", "</role>"),
        refused=_NO_REASONING,
    ),
    "ERNIE 4.5": Family(
        turns(
            "User: @\n",
            "Assistant: @{{ eos_token }}",
            "Assistant: ",
            system="@\n",
            before="{{ bos_token }}",
        ),
        "Assistant: ",
        r"<\|end_of_sentence\|>",
        "<|end_of_sentence|>",
        "<|begin_of_sentence|>",
        refused=_RAISES_FOR_TOOLS,
    ),
    "TeleChat": Family(
        turns("<_user>@", "<_bot>@<_end>", "<_bot>", system="<_system>@"),
        "<_bot>",
        "<_end>",
        "<_end>",
        "<_start>",
        ("<_user>", "<_bot>", "<_system>"),
        refused=_RAISES_FOR_TOOLS,
    ),
    "marked answers": _of_chatml(chatml("<|im_start|>assistant\n{% generation %}@<|im_end|>{% endgeneration %}\n")),
}
"""Families by name."""

VARIANTS: Final[dict[str, Family]] = {
    "Qwen 3 without reasoning": replace(FAMILIES["Qwen 3"], start=_IM_START + "<think>\n\n</think>\n\n")
}
"""Families with a variable of the template set by the record."""
