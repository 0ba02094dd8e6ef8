"""Small tokenizers with chat templates of the families in use, made here: nothing is fetched."""

from __future__ import annotations

from functools import cache
from pathlib import Path

CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""As SmolLM2 and Qwen2.5, without their default system prompts."""

CHATML_WITHOUT_PROMPT = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
)

CHATML_MARKED = (
    "{%- for message in messages %}{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{%- generation %}{{ message.content + '<|im_end|>' }}{%- endgeneration %}{{ '\n' }}"
    "{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)

LLAMA3 = (
    "{{ bos_token }}{%- for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)

MISTRAL = (
    "{{ bos_token }}{%- for message in messages %}{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{%- endif %}{%- endfor %}"
)
"""No generation prompt, and none needed."""

QWEN3 = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.last and message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}"
    "{{ message.content or '' }}{%- for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}{{ call.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""As Qwen3 in what matters here: earlier turns lose their thoughts, tools and tool calls are shown."""

_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_MISTRAL_TOKENS = ("<s>", "</s>")
_FAMILIES: dict[str, tuple[str | None, tuple[str, ...], str | None, str]] = {  # template, control tokens, bos, eos
    "chatml": (CHATML, _CHATML_TOKENS, None, "<|im_end|>"),
    "chatml_without_prompt": (CHATML_WITHOUT_PROMPT, _CHATML_TOKENS, None, "<|im_end|>"),
    "chatml_marked": (CHATML_MARKED, _CHATML_TOKENS, None, "<|im_end|>"),
    "llama3": (LLAMA3, _LLAMA_TOKENS, "<|begin_of_text|>", "<|eot_id|>"),
    "mistral": (MISTRAL, _MISTRAL_TOKENS, "<s>", "</s>"),
    "qwen3": (QWEN3, _CHATML_TOKENS, None, "<|im_end|>"),
    "bare": (None, _CHATML_TOKENS, None, "<|endoftext|>"),
}
FAMILIES = tuple(_FAMILIES)

LLAMA_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Llama 3's way: newlines in a row are one word, whatever follows."""

TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. Hello, how are you? I am fine, thank you.",
    "system user assistant tool You are a helpful assistant. What is the capital of France? The capital is Paris.",
    "Wie geht es dir? Gut, danke! Où est la gare ? La gare est là-bas. 你好 世界。",
    "One\n\n\nTwo\n\n\nThree\n\n\nFour\n\n\nFive",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
)


def make_tokenizer(folder: Path, family: str) -> Path:
    """Write the tokenizer of ``family`` into ``folder``: byte-level BPE, so that any text has tokens. Returns the folder."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    template, control, bos, eos = _FAMILIES[family]
    backend = Tokenizer.from_str(_trained(control))
    if bos is not None:  # as Llama 3: plain tokenising adds begin-of-sequence
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, extra_special_tokens=list(control)
    )
    made.chat_template = template
    made.save_pretrained(str(folder))
    return folder


@cache
def _trained(control: tuple[str, ...]) -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's way to cut words
    if control == _LLAMA_TOKENS:
        words = pre_tokenizers.Split(Regex(LLAMA_WORDS), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_only])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(control),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_TEXT * 3, trainer)
    text: str = backend.to_str()
    return text
