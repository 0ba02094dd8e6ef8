"""Chat templates of the families in use, and small tokenizers to match.

Those in ``tests/data/templates`` are the published ones, unchanged, each with its source and licence in SOURCES.md there.
The others are written here, from knowledge of the formats, where a licence does not let the published ones be copied or no
copy was at hand: long fixed texts are shortened, everything that decides where an answer begins and ends is as it is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.helpers.tokenizers import LLAMA_WORDS, TRAINING_TEXT

PUBLISHED = Path(__file__).parents[1] / "data" / "templates"


def published(name: str) -> str:
    """A published template."""
    return (PUBLISHED / f"{name}.jinja").read_text()


LLAMA31 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, answer with JSON.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

_QWEN_SYSTEM = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
"""
_QWEN_CALLS = """
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""

_QWEN3_TURNS = (
    _QWEN_SYSTEM
    + """
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == 'user' %}{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
"""
    + _QWEN_CALLS
)
QWEN3_THINKING = _QWEN3_TURNS + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"

DEEPSEEK_V3 = """
{%- set ns = namespace(is_tool=false, is_first=true) %}
{{- bos_token }}{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.is_tool = false %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {%- set ns.is_tool = false %}{%- set ns.is_first = true %}
        {%- for call in message.tool_calls %}
            {%- if ns.is_first %}{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{%- set ns.is_first = false %}{%- else %}{{- '\\n' }}{%- endif %}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}{{- call.function.arguments | tojson }}
            {{- '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}
        {%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' + message.content + '<｜end▁of▁sentence｜>' }}{%- set ns.is_tool = false %}
        {%- else %}{{- '<｜Assistant｜>' + message.content + '<｜end▁of▁sentence｜>' }}{%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if not ns.is_tool %}{{- '<｜tool▁outputs▁begin｜>' }}{%- set ns.is_tool = true %}{%- else %}{{- '\\n' }}{%- endif %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{- '<｜Assistant｜>' }}{%- endif %}
"""
MISTRAL_V3 = """
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}
{%- else %}{%- set system = none %}{%- set turns = messages %}{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}{{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {%- if loop.last and system %}{{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}{{- call.function | tojson }}{%- endfor %}{{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + message.content + '}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user, assistant and tool roles are supported!') }}{%- endif %}
{%- endfor %}
"""
"""The system prompt stands in the last user turn, tools before it: neither cut is a beginning of the whole."""

GEMMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}{%- set role = 'model' %}{%- else %}{%- set role = message['role'] %}{%- endif %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

PHI4 = """
{%- for message in messages %}{{- '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}
"""

_SHOWN = """
        {%- if reasoning_mode == "/think" -%}
            {{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\\n" + "<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- endif -%}"""


def smollm3_marked() -> str:
    """SmolLM3's template with its marks, which the copy has lost: the header and the last line break stand inside."""
    before, turn, after = published("smollm3").partition(_SHOWN)
    assert turn
    return f"{before}\n        {{% generation %}}{turn}\n        {{% endgeneration %}}{after}"


@dataclass(frozen=True, slots=True)
class Family:
    """A template, the control tokens around it, and tokens that are whole but no control tokens."""

    template: str
    control: tuple[str, ...]
    whole: tuple[str, ...] = ()
    bos: str | None = None
    eos: str | None = None


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_DEEPSEEK_TOKENS = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
_KIMI_TOKENS = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
_MISTRAL_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
_PHI_TOKENS = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
FAMILIES: dict[str, Family] = {
    "llama31": Family(
        LLAMA31, ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        bos="<|begin_of_text|>", eos="<|eot_id|>",
    ),
    "qwen25": Family(published("qwen25"), _CHATML, _THINK[2:4], eos="<|im_end|>"),
    "qwen3": Family(published("qwen3"), _CHATML, _THINK, eos="<|im_end|>"),
    "qwen3_thinking": Family(QWEN3_THINKING, _CHATML, _THINK, eos="<|im_end|>"),
    "deepseek_v3": Family(DEEPSEEK_V3, _DEEPSEEK_TOKENS, (), *_DEEPSEEK_TOKENS[:2]),
    "deepseek_r1": Family(published("deepseek_r1"), _DEEPSEEK_TOKENS, ("<think>", "</think>"), *_DEEPSEEK_TOKENS[:2]),
    "deepseek_v31": Family(published("deepseek_v31"), _DEEPSEEK_TOKENS, ("<think>", "</think>"), *_DEEPSEEK_TOKENS[:2]),
    "kimi_k2": Family(published("kimi_k2"), _KIMI_TOKENS, eos="<|im_end|>"),
    "kimi_k2_thinking": Family(published("kimi_k2_thinking"), _KIMI_TOKENS, ("<think>", "</think>"), eos="<|im_end|>"),
    "mistral_v3": Family(MISTRAL_V3, _MISTRAL_TOKENS, bos="<s>", eos="</s>"),
    "mistral_nemo": Family(published("mistral_nemo"), _MISTRAL_TOKENS, bos="<s>", eos="</s>"),
    "gemma": Family(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>", eos="<eos>"),
    "phi3": Family(published("phi3"), _PHI_TOKENS, eos="<|endoftext|>"),
    "phi4": Family(PHI4, ("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"), eos="<|im_end|>"),
    "smollm2": Family(published("smollm2"), _CHATML, eos="<|im_end|>"),
    "smollm3": Family(smollm3_marked(), _CHATML, ("<think>", "</think>"), eos="<|im_end|>"),
    "granite": Family(published("granite33"), ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"), eos="<|end_of_text|>"),
    "glm45": Family(published("glm45"), _GLM_TOKENS, _THINK[:4], eos="<|endoftext|>"),
    # as TRL trains with them: they mark what is generated, each in another way
    "marked_qwen25": Family(published("marked_qwen25"), _CHATML, _THINK[2:4], eos="<|im_end|>"),
    "marked_qwen3": Family(published("marked_qwen3"), _CHATML, _THINK, eos="<|im_end|>"),
    "marked_phi3": Family(published("marked_phi3"), _PHI_TOKENS, eos="<|endoftext|>"),
    "marked_deepseek": Family(published("marked_deepseek"), _DEEPSEEK_TOKENS, ("<think>", "</think>"), *_DEEPSEEK_TOKENS[:2]),
    "marked_glm": Family(published("marked_glm"), _GLM_TOKENS, _THINK[:4], eos="<|endoftext|>"),
}  # fmt: skip


def make_family(folder: Path, name: str) -> Path:
    """Write the tokenizer and template of family ``name`` into ``folder``. Returns the folder."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    backend = Tokenizer.from_str(_trained(family.control))
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.whole])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.eos,
        extra_special_tokens=list(family.control),
    )
    made.chat_template = family.template.strip("\n")
    made.save_pretrained(str(folder))
    return folder


@cache
def _trained(control: tuple[str, ...]) -> str:
    """Byte-level BPE that cuts words as Llama 3, Qwen and Kimi do: newlines in a row are one word."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(LLAMA_WORDS), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_only])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(control),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_TEXT * 3, trainer)
    text: str = backend.to_str()
    return text
