"""Templates in the manner of those that models come with, snippets of every construct, and both renderers: ours, and the
one of transformers that it must agree with."""

from contextlib import suppress
from functools import lru_cache
from typing import Any

from holdfast.errors import TemplateError
from holdfast.text.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "You are  helpful.\n"},
    {"role": "user", "content": "What is 2 < 3 & 'x'?\nSecond line"},
    {
        "role": "assistant",
        "content": "<think>hm</think>Yes é中😀",
        "tool_calls": [{"name": "f", "arguments": {"b": 1, "a": [1.5, None, True]}}],
    },
    {"role": "tool", "content": "result", "name": "f"},
    {"role": "user", "content": "thanks"},
]
VARIABLES: dict[str, Any] = {
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "int"}}}},
        }
    ],
    "documents": None,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "numbers": [3, 1, 2, 2],
    "words": ["b", "A", "c", "a"],
    "rows": [{"k": "x", "n": 2}, {"k": "y", "n": 1}, {"k": "x", "n": 0}],
    "text": "The quick  brown\n\tfox <b>&</b> 'q' \"r\" É",
    "table": {"b": 2, "a": 1, "C": 3},
    "nothing": None,
    "yes": True,
    "number": 7,
    "real": 2.5,
}


@lru_cache(16)
def compiled(source: str) -> ChatTemplate:
    """One for all chats, as an engine has it."""
    return ChatTemplate(source, "test", {})


def ours(source: str, messages: Any = MESSAGES, add_generation_prompt: bool = True, **more: Any) -> str:
    extra = {**VARIABLES, **more}
    return compiled(source).render(messages, add_generation_prompt=add_generation_prompt, **extra)


def theirs(source: str, messages: Any = MESSAGES, add_generation_prompt: bool = True, **more: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    extra = {**VARIABLES, **more}
    texts, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=add_generation_prompt, **extra
    )
    return texts[0]


def agree(source: str, **options: Any) -> str | None:
    """Assert that both write the same or both refuse; the text, or None."""
    expected, text, refusal = None, None, None
    with suppress(Exception):
        expected = theirs(source, **options)
    try:
        text = ours(source, **options)
    except TemplateError as error:
        refusal = error
    assert text == expected, f"ours refuses: {refusal}" if text is None else "the texts differ"
    return text


CHAT_TEMPLATES = {
    "marked turns": (
        "{% for message in messages %}"
        "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "headers and date": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|header|>system<|end_header|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" + system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0] %}
        {{- '<|header|>assistant<|end_header|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|header|>ipython<|end_header|>\\n\\n" }}
        {%- if message.content is mapping or message.content is not string and message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- else %}
        {{- '<|header|>' + message['role'] + '<|end_header|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|end_header|>\\n\\n' }}
{%- endif %}
""",
    "alternating instructions": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(turns=0) %}
{%- for message in loop_messages if message.role != 'tool' %}
    {%- if (message["role"] == "user") != (ns.turns % 2 == 0) %}
        {{- raise_exception("Roles must alternate: user, assistant, user, ...") }}
    {%- endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token }}
    {%- else %}
        {{- raise_exception("Unknown role " ~ message["role"]) }}
    {%- endif %}
{%- endfor %}
""",
    "thinking": """{%- set ns = namespace(multi_step=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string and not(message.content.startswith('<reply>') and message.content.endswith('</reply>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<reply>\\n' }}{{- content }}{{- '\\n</reply>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "calls in tags": """{#- In the manner of Qwen3.5 and 3.6: parts of content by macro, calls in tags, thoughts since the last question. #}
{%- set media = namespace(images=0) %}
{%- macro shown(content, is_first=false) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if 'image' in part or 'image_url' in part or part.type == 'image' %}
                {%- if is_first %}{{- raise_exception('pictures belong to users') }}{%- endif %}
                {%- set media.images = media.images + 1 %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}{{- part.text }}
            {%- else %}{{- raise_exception('unknown part') }}{%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}{{- '' }}
    {%- else %}{{- raise_exception('unknown content') }}{%- endif %}
{%- endmacro %}
{%- if not messages %}{{- raise_exception('no messages') }}{%- endif %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\\n# Functions\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall one so:\\n<tool_call>\\n<function=a_name>\\n<parameter=a_key>\\na value\\n</parameter>\\n</function>\\n</tool_call>' }}
    {%- if messages[0].role == 'system' %}
        {%- set rules = shown(messages[0].content, true) | trim %}
        {%- if rules %}{{- '\\n\\n' + rules }}{%- endif %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + (shown(messages[0].content, true) | trim) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(is_searching=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.is_searching and message.role == 'user' %}
        {%- set content = shown(message.content) | trim %}
        {%- if not (content.startswith('<tool_response>') and content.endswith('</tool_response>')) %}
            {%- set ns.is_searching = false %}{%- set ns.last_query = messages | length - 1 - loop.index0 %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if ns.is_searching %}{{- raise_exception('no question') }}{%- endif %}
{%- for message in messages %}
    {%- set content = shown(message.content) | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('rules come first') }}{%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if (preserve_thinking is defined and preserve_thinking is true) or loop.index0 > ns.last_query %}
            {{- '<think>\\n' + (thoughts | trim) + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
            {%- for call in message.tool_calls %}
                {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
                {%- if loop.first and not content | trim %}{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
                {%- elif loop.first %}{{- '\\n\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
                {%- else %}{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}{%- endif %}
                {%- if call.arguments is defined %}
                    {%- for key, value in call.arguments | items %}
                        {{- '<parameter=' + key + '>\\n' }}
                        {{- (value | string) if value is string else (value | tojson) }}
                        {{- '\\n</parameter>\\n' }}
                    {%- endfor %}
                {%- endif %}
                {{- '</function>\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- raise_exception('unknown role') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' }}
{%- endif %}""",
    "renamed roles": (
        "{{ bos_token }}{% for message in messages %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
    ),
    "schemas by macro": """{%- macro kind(spec) -%}
    {%- if spec.type == "object" -%}
        {{- "{" }}{%- for name, inner in spec.properties|dictsort -%}{{- name }}: {{ kind(inner) }}{%- if not loop.last %}, {% endif -%}{%- endfor -%}{{- "}" }}
    {%- elif spec.type == "array" -%}
        {{- kind(spec['items']) ~ "[]" }}
    {%- elif spec.enum is defined -%}
        {{- spec.enum|map('tojson')|join(' | ') }}
    {%- else -%}
        {{- spec.type|default('any', true) }}
    {%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] %}{% generation %}type {{ tool.function.name }} = ({{ kind(tool.function.parameters) }}) => any;
{% endgeneration %}{% endfor -%}
{%- for message in messages %}
{%- if message.role == 'system' %}{% continue %}{% endif %}
{{ loop.index }}. {{ message.role|upper }}: {{ message.content|replace('\\n', ' ')|trim }}
{%- if loop.index > 50 %}{% break %}{% endif %}
{%- endfor %}
""",
    "channels": """{#- In the manner of gpt-oss: macros that call themselves, several namespaces, thoughts that later turns drop. #}
{%- macro shape(spec, needed, may_be_null=false) -%}
    {%- if spec.type == "array" -%}
        {%- if spec['items'] -%}
            {%- set inner = shape(spec['items'], needed) -%}
            {{- "any[]" if inner|length > 40 else inner + "[]" }}
        {%- else -%}
            {{- "any[]" }}
        {%- endif -%}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping and spec.type[0] is defined -%}
        {{- spec.type|join(" or ") }}
    {%- elif spec.oneOf -%}
        {%- for way in spec.oneOf -%}{{- shape(way, needed) -}}{%- if not loop.last %}{{- " or " }}{% endif -%}{%- endfor -%}
    {%- elif spec.enum -%}
        {{- '"' + spec.enum|join('" or "') + '"' -}}
    {%- elif spec.type == "object" and spec.properties -%}
        {{- "{" }}
        {%- for name, own in spec.properties.items() -%}
            {{- name -}}{%- if name not in (spec.required or []) -%}{{- "?" }}{%- endif -%}
            {{- ": " }}{{ shape(own, spec.required or []) }}{%- if not loop.last -%}{{-", " }}{%- endif -%}
        {%- endfor -%}
        {{- "}" }}
    {%- else -%}
        {{- spec.type if spec.type is string else "any" }}
    {%- endif -%}
    {%- if may_be_null or spec.nullable %}{{- " or null" }}{%- endif -%}
{%- endmacro -%}
{%- macro listing(heading, tools) -%}
    {{- "# " + heading + "\\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + (tool.description or "-") + "\\n" + tool.name + "(" }}
        {%- if tool.parameters and tool.parameters.properties -%}{{- shape(tool.parameters, []) }}{%- endif -%}
        {{- ")\\n" }}
    {%- endfor %}
{%- endmacro -%}
{%- macro preamble() -%}
    {%- if identity is not defined %}{%- set identity = "A model." %}{%- endif %}
    {{- identity + "\\nIn " + strftime_now("%Y") + ", effort " }}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "some" %}{%- endif %}
    {{- reasoning_effort + ".\\n" }}
    {%- set found = namespace(browser=false) %}
    {%- for tool in builtin_tools or [] %}{%- if tool == "browser" %}{%- set found.browser = true %}{%- endif %}{%- endfor %}
    {%- if found.browser %}{{- "It browses.\\n" }}{%- endif %}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- preamble() }}{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set orders = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set orders = "" %}{%- set turns = messages %}
{%- endif %}
{%- if orders or tools %}
    {{- "<|start|>developer<|message|>" + orders }}{%- if tools -%}{{- listing("functions", tools) }}{%- endif -%}{{- "<|end|>" }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in turns -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and "<|channel|>" in message.content %}{{- raise_exception("channels belong elsewhere") }}{%- endif %}
        {%- if "tool_calls" in message %}
            {%- set answered = namespace(later=false) %}
            {%- for other in turns[loop.index:] %}
                {%- if other.role == 'assistant' and "tool_calls" not in other %}{%- set answered.later = true %}{%- endif %}
            {%- endfor %}
            {%- set call = message.tool_calls[0] %}{%- if call.function %}{%- set call = call.function %}{%- endif %}
            {%- if message.thinking and not answered.later %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=" + call.name + " " + (call.content_type if call.content_type is defined else "json") }}
            {{- "<|message|>" }}{{- call.arguments|tojson }}{{- "<|call|>" }}
            {%- set last_call.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}{{- "<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_call.name is none %}{{- raise_exception("no tool was called") }}{%- endif %}
        {{- "<|start|>" + last_call.name + " to=assistant<|message|>" + message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
""",
}
"""Each uses what is particular to its family."""
SNIPPETS = {
    "plain text": "just text, with trailing newline\n",
    "several newlines": "\n\na\n\n\n",
    "comments": "a{# note #}b\n{# line #}\nc",
    "raw": "{% raw %}{{ not }} {% run %}{% endraw %}",
    "blocks trimmed": "  {% if yes %}\n    x\n  {% endif %}\ny",
    "minus signs": "a  {%- if yes -%}  b  {%- endif -%}  c",
    "plus sign": "  {%+ if yes %}x{% endif %}",
    "print kinds": "{{ 1 }} {{ 2.5 }} {{ none }} {{ true }} {{ 'é' }} {{ [1, 'a', none] }} {{ (1,) }} {{ {'k': [1]} }} {{ unknown }}",
    "concatenation": "{{ 'a' ~ 1 ~ none ~ 2.5 ~ [1] ~ unknown ~ true }}",
    "concatenation of markup": "{{ ('<'|safe) ~ '<' }} {{ ('<'|safe) + '<' }} {{ '<' + ('&'|safe) }}",
    "arithmetic": "{{ 7 + 2 }} {{ 7 - 2.5 }} {{ 7 * 2 }} {{ 7 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ 2 ** 10 }} {{ -number }} {{ +number }}",
    "sequences": "{{ 'ab' * 3 }} {{ [1] * 2 + [3] }} {{ (1, 2) + (3,) }} {{ 'a' + 'b' }} {{ 'x=%s' % 5 }} {{ '%(a)s' % {'a': 1} }}",
    "comparisons": "{{ 1 == 1.0 }} {{ 'a' != 'b' }} {{ 1 < 2 <= 2 > 1 >= 0 }} {{ [1] == [1] }} {{ none == none }} {{ 'a' in 'abc' }} {{ 3 not in [1, 2] }}",
    "logic": "{{ (yes and nothing) or 'x' }} {{ not yes }} {{ 1 if nothing else 2 }} {{ 'a' if yes }} {{ 'a' if nothing }}",
    "slices": "{{ text[2:8] }} {{ numbers[1:] }} {{ numbers[:-1] }} {{ numbers[::-1] }} {{ messages[1:]|length }} {{ text[::3] }} {{ ''[1:] }}",
    "slice of nothing": "{{ unknown[1:] }}",
    "items": "{{ messages[0].role }} {{ messages[0]['role'] }} {{ messages[-1]['content'] }} {{ table.b }} {{ table['zz'] }} {{ numbers.0 }}",
    "item of unknown": "{{ unknown.x }}",
    "tuple keys": "{{ {(1, 2): 'x'}[(1, 2)] }} {{ {(1, 2): 'x'}[1, 2] }}",
    "loop": "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role }}{{ ',' if not loop.last }}{% endfor %}",
    "loop variables": "{% for n in numbers %}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{{ loop.changed(n) }}{{ loop.depth }};{% endfor %}",
    "loop with test": "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.length }}{{ m.content }}{% else %}none{% endfor %}",
    "loop else": "{% for m in [] %}x{% else %}empty{% endfor %}",
    "loop over text": "{% for c in 'aé中' %}[{{ c }}]{% endfor %}",
    "loop over dict": "{% for k in table %}{{ k }}{% endfor %}{% for k, v in table.items() %}{{ k }}={{ v }};{% endfor %}",
    "loop over unknown": "{% for m in unknown %}x{% else %}empty{% endfor %}",
    "loop over number": "{% for m in 5 %}x{% endfor %}",
    "loop over lazy": "{% for r in messages|map(attribute='role') %}{{ loop.index }}{{ r }}{{ loop.last }}{% endfor %}",
    "loop length of lazy": "{% for r in messages|map(attribute='role') %}{{ loop.length }}{{ loop.revindex }}{% endfor %}",
    "loop unpacking": "{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "loop break": "{% for n in range(9) %}{% if n == 2 %}{% continue %}{% endif %}{% if n == 5 %}{% break %}{% endif %}{{ n }}{% endfor %}",
    "nested loops": "{% for a in [1, 2] %}{% for b in [3, 4] %}{{ a }}{{ b }}{{ loop.index }} {% endfor %}{{ loop.index }}{% endfor %}",
    "recursive loop": "{% for x in [{'n': 1, 'c': [{'n': 2, 'c': []}]}] recursive %}{{ x.n }}{{ loop.depth }}{{ loop(x.c) }}{% else %}-{% endfor %}",
    "loop scope": "{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{% endfor %}{{ x }}",
    "namespace": "{% set ns = namespace(a=1, b='x') %}{% for i in range(3) %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.b }}{{ ns.c }}",
    "set block": "{% set x %}a {{ number }}\n{% endset %}[{{ x }}]{{ x|length }}",
    "set block filtered": "{% set x | upper %}a {{ number }}{% endset %}{{ x }}",
    "several names": "{% set a, b = 1, [2] %}{{ a }}{{ b }}",
    "macro": "{% macro f(a, b=2) %}[{{ a }}{{ b }}{{ varargs }}{{ kwargs }}]{% endmacro %}{{ f(1) }}{{ f(1, 3, 4, x=5) }}{{ f.name }}{{ f.arguments }}",
    "macro simple": "{% macro f(a, b='d') -%}\n <{{ a }}|{{ b }}>\n{%- endmacro %}{{ f(1) }}{{ f(b=1, a=2) }}{{ f() }}",
    "macro closure": "{% set y = 5 %}{% macro f() %}{{ y }}{{ bos_token }}{% endmacro %}{{ f() }}",
    "macro recursion": "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(9) }}",
    "macro result": "{% macro f() %} a {% endmacro %}{{ f()|trim ~ f()|length }}",
    "call block": "{% macro f(x) %}({{ x }}{{ caller(7) }}){% endmacro %}{% call(v) f(1) %}body{{ v }}{% endcall %}",
    "filter block": "{% filter upper|replace('A', 'b') %}ab {{ number }}{% endfilter %}",
    "block": "{% block b %}in{{ number }}{% endblock %}{{ self.b() }}",
    "with": "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ loop.index }}{% endgeneration %}{% endif %}{% endfor %}",
    "generation scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "elif": "{% if nothing %}a{% elif yes %}b{% else %}c{% endif %}",
    "raise": "{{ raise_exception('roles must alternate') }}",
    "range": "{{ range(3)|list }}{{ range(5, 1, -2)|list }}{% for i in range(2) %}{{ i }}{% endfor %}",
    "dict": "{{ dict(a=1)['a'] }}{{ dict([('k', 2)]).k }}",
    "strings of code": "{{ '\\n\\t\\\\' }}{{ \"it's\" }}{{ 'a' 'b' }}",
    "numbers": "{{ 1_000 }} {{ 0x1f }} {{ 1e3 }} {{ 0b101 }} {{ 1.50 }}",
    "syntax error": "{% if yes %}",
    "unknown tag": "{% magic %}",
    "unknown filter": "{{ 'a'|magic }}",
    "unknown test": "{{ 'a' is magic }}",
    "include": "{% include 'other' %}",
    "import": "{% import 'other' as o %}",
    "extends": "{% extends 'other' %}",
    "do": "{% do numbers.append(1) %}",
    "wrong types": "{{ 'a' + 1 }}",
    "division by zero": "{{ 1 / 0 }}",
    "call of text": "{{ 'a'() }}",
    "call of unknown": "{{ unknown() }}",
    "add unknown": "{{ 'a' + unknown }}",
}
FILTER_SNIPPETS = {
    "abs": "{{ -3|abs }} {{ -2.5|abs }}",
    "attr": "{{ table|attr('items') is callable }} {{ table|attr('zz') is defined }}",
    "capitalize": "{{ 'aBC d'|capitalize }} {{ 5|capitalize }}",
    "count": "{{ text|count }} {{ numbers|count }}",
    "d": "{{ unknown|d('x') }} {{ ''|d('x', true) }}",
    "default": "{{ unknown|default }} {{ nothing|default('x') }} {{ nothing|default('x', boolean=true) }} {{ 0|default(5) }}",
    "dictsort": "{{ table|dictsort }} {{ table|dictsort(true) }} {{ table|dictsort(false, 'value', reverse=true) }}",
    "e": "{{ text|e }}",
    "escape": "{{ text|escape }} {{ ('<'|safe)|escape }}",
    "first": "{{ numbers|first }} {{ text|first }} {{ []|first }} {{ messages|map(attribute='role')|first }}",
    "float": "{{ '2.50'|float }} {{ 'x'|float }} {{ 'x'|float(1.5) }} {{ 3|float }}",
    "format": "{{ '%s-%05.1f-%d%%'|format('a', 2.25, 7) }} {{ '%(a)s'|format(a=1) }}",
    "indent": "{{ text|indent }}|{{ text|indent(2, true) }}|{{ 'a\\n\\nb'|indent('--', blank=true) }}",
    "int": "{{ '42'|int }} {{ 'x'|int }} {{ 'x'|int(7) }} {{ '1f'|int(base=16) }} {{ 3.9|int }} {{ '0x1f'|int(base=16) }}",
    "items": "{% for k, v in table|items %}{{ k }}{{ v }}{% endfor %}{{ unknown|items|list }}",
    "join": "{{ words|join(', ') }} {{ [1, none, 'a']|join }} {{ rows|join('-', attribute='k') }} {{ 'abc'|join('.') }} {{ numbers|map('string')|join('+') }}",
    "last": "{{ numbers|last }} {{ text|last }} {{ []|last }}",
    "length": "{{ text|length }} {{ table|length }} {{ unknown|length }} {{ messages[1:]|length }}",
    "list": "{{ 'aé'|list }} {{ table|list }} {{ range(3)|list }} {{ table.items()|list }} {{ words|map('upper')|list }}",
    "lower": "{{ 'ÀB'|lower }} {{ 5|lower }}",
    "map": "{{ rows|map(attribute='k')|list }} {{ rows|map(attribute='zz', default='-')|list }} {{ words|map('upper')|join }} {{ words|map('replace', 'a', 'x')|list }}",
    "max": "{{ numbers|max }} {{ words|max }} {{ words|max(case_sensitive=true) }} {{ rows|max(attribute='n') }}",
    "min": "{{ numbers|min }} {{ []|min }} {{ rows|min(attribute='n') }}",
    "reject": "{{ numbers|reject('odd')|list }} {{ [0, 1, '', 'a']|reject|list }}",
    "rejectattr": "{{ rows|rejectattr('n')|list }} {{ messages|rejectattr('role', 'equalto', 'user')|map(attribute='role')|list }}",
    "replace": "{{ text|replace('q', 'Q') }} {{ 'aaa'|replace('a', 'b', 2) }} {{ 'ab'|replace('', '-') }} {{ 15|replace('1', 'x') }}",
    "reverse": "{{ 'abc'|reverse }} {{ numbers|reverse|list }}",
    "safe": "{{ '<b>'|safe }} {{ [1]|safe }}",
    "select": "{{ numbers|select('odd')|list }} {{ numbers|select('greaterthan', 1)|list }} {{ [0, 1]|select|list }}",
    "selectattr": "{{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ rows|selectattr('n')|map(attribute='n')|list }} {{ messages|selectattr('tool_calls', 'defined')|list|length }}",
    "sort": "{{ numbers|sort }} {{ numbers|sort(reverse=true) }} {{ words|sort }} {{ words|sort(case_sensitive=true) }} {{ rows|sort(attribute='n,k')|map(attribute='n')|list }}",
    "string": "{{ 5|string + 'x' }} {{ [1]|string }} {{ none|string }}",
    "title": "{{ 'hello wORLD foo-bar (baz)'|title }}",
    "tojson": "{{ messages|tojson }} {{ table|tojson(indent=2) }} {{ 'é<>&\\'\"'|tojson }} {{ 'é'|tojson(ensure_ascii=true) }} {{ table|tojson(sort_keys=true, separators=(',', ':')) }} {{ none|tojson }}",
    "trim": "[{{ '  a b \\n'|trim }}] {{ 'xxaxx'|trim('x') }} {{ 5|trim }}",
    "truncate": "{{ text|truncate(9) }} {{ text|truncate(9, true, '..', 0) }}",
    "unique": "{{ numbers|unique|list }} {{ words|unique|list }} {{ words|unique(true)|list }} {{ rows|unique(attribute='k')|list|length }}",
    "upper": "{{ 'straße'|upper }}",
}
TEST_SNIPPETS = {
    "odd": "{{ 3 is odd }} {{ 2 is odd }}",
    "even": "{{ 3 is even }} {{ 2 is even }}",
    "divisibleby": "{{ 9 is divisibleby(3) }} {{ 9 is divisibleby 2 }}",
    "defined": "{{ text is defined }} {{ unknown is defined }} {{ messages[0].zz is defined }} {{ unknown is not defined }}",
    "undefined": "{{ unknown is undefined }}",
    "filter": "{{ 'upper' is filter }} {{ 'magic' is filter }}",
    "test": "{{ 'odd' is test }} {{ 'magic' is test }}",
    "none": "{{ nothing is none }} {{ 0 is none }}",
    "boolean": "{{ yes is boolean }} {{ 1 is boolean }}",
    "false": "{{ false is false }} {{ 0 is false }}",
    "true": "{{ yes is true }} {{ 1 is true }}",
    "integer": "{{ 1 is integer }} {{ yes is integer }}",
    "float": "{{ real is float }} {{ 1 is float }}",
    "lower": "{{ 'ab' is lower }} {{ 'aB' is lower }}",
    "upper": "{{ 'AB' is upper }} {{ 5 is upper }}",
    "string": "{{ text is string }} {{ numbers is string }}",
    "mapping": "{{ table is mapping }} {{ numbers is mapping }} {{ messages[0] is mapping }}",
    "number": "{{ 1 is number }} {{ 'a' is number }}",
    "sequence": "{{ numbers is sequence }} {{ 5 is sequence }} {{ text is sequence }}",
    "iterable": "{{ numbers is iterable }} {{ 5 is iterable }} {{ words|map('upper') is iterable }}",
    "callable": "{{ range is callable }} {{ text is callable }}",
    "sameas": "{{ none is sameas none }} {{ nothing is sameas(yes) }}",
    "escaped": "{{ ('a'|safe) is escaped }} {{ 'a' is escaped }}",
    "in": "{{ 1 is in [1, 2] }} {{ 'a' is in 'abc' }} {{ 'a' is in table }}",
    "==": "{{ numbers|select('==', 2)|list }}",
    "eq": "{{ 1 is eq 1 }} {{ [1] is eq([1]) }}",
    "equalto": "{{ 'a' is equalto 'a' }}",
    "!=": "{{ numbers|select('!=', 2)|list }}",
    "ne": "{{ 1 is ne 2 }}",
    ">": "{{ numbers|select('>', 1)|list }}",
    "gt": "{{ 2 is gt 1 }}",
    "greaterthan": "{{ 2 is greaterthan(3) }}",
    "ge": "{{ 2 is ge 2 }}",
    ">=": "{{ numbers|select('>=', 2)|list }}",
    "<": "{{ numbers|select('<', 2)|list }}",
    "lt": "{{ 2 is lt 1 }}",
    "lessthan": "{{ 2 is lessthan 3 }}",
    "<=": "{{ numbers|select('<=', 2)|list }}",
    "le": "{{ 2 is le 2 }}",
}
CORNERS = {
    "lazy is true": "{{ 'yes' if messages|selectattr('role', 'equalto', 'zz') }}",
    "lazy has no length": "{{ words|map('upper')|length }}",
    "lazy is consumed once": "{% set x = words|map('upper') %}{{ x|list }}{{ x|list }}",
    "lazy of lazy": "{{ words|map('upper')|select('ne', 'B')|map('lower')|list }}",
    "lazy last": "{{ words|map('upper')|last }}",
    "json of lazy": "{{ words|map('upper')|tojson }}",
    "json of unknown": "{{ unknown|tojson }}",
    "json of function": "{{ range|tojson }}",
    "sort of mixed": "{{ [1, 'a']|sort }}",
    "odd text": "{{ 'a' is odd }}",
    "map without arguments": "{{ numbers|map|list }}",
    "map to unknown filter": "{{ numbers|map('magic')|list }}",
    "chain": "{{ messages|map(attribute='content')|map('trim')|map('length')|list|join('-') }}",
    "dynamic arguments": "{{ 'aXb'|replace(*['X', '-']) }} {{ '%(a)s'|format(**{'a': 1}) }}",
}
STRING_SNIPPETS = {
    "capitalize": "{{ 'aB'.capitalize() }}",
    "casefold": "{{ 'ß'.casefold() }}",
    "count": "{{ text.count('o') }} {{ 'aaaa'.count('a', 1, 3) }}",
    "endswith": "{{ text.endswith('É') }} {{ 'ab'.endswith(('x', 'b')) }}",
    "find": "{{ text.find('fox') }} {{ text.find('zz') }}",
    "index": "{{ text.index('fox') }}",
    "isalnum": "{{ 'a1'.isalnum() }}",
    "isalpha": "{{ 'a1'.isalpha() }}",
    "isascii": "{{ text.isascii() }}",
    "isdecimal": "{{ '12'.isdecimal() }}",
    "isdigit": "{{ '12'.isdigit() }}",
    "isidentifier": "{{ 'a b'.isidentifier() }}",
    "islower": "{{ 'ab'.islower() }}",
    "isnumeric": "{{ '½'.isnumeric() }}",
    "isprintable": "{{ text.isprintable() }}",
    "isspace": "{{ ' \\n'.isspace() }}",
    "istitle": "{{ 'Ab C'.istitle() }}",
    "isupper": "{{ 'AB'.isupper() }}",
    "join": "{{ ', '.join(words) }} {{ '-'.join('abc') }} {{ '+'.join(words|map('upper')) }} {{ ''.join([]) }}",
    "lower": "{{ 'ÀB'.lower() }}",
    "lstrip": "{{ '  a '.lstrip() }}|{{ 'xya'.lstrip('xy') }}",
    "partition": "{{ 'a=b=c'.partition('=') }}",
    "removeprefix": "{{ 'abc'.removeprefix('ab') }}",
    "removesuffix": "{{ 'abc'.removesuffix('bc') }}",
    "replace": "{{ text.replace('quick', 'slow') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ 'ab'.replace('', '-') }}",
    "rfind": "{{ text.rfind('o') }}",
    "rindex": "{{ text.rindex('o') }}",
    "rpartition": "{{ 'a=b=c'.rpartition('=') }}",
    "rsplit": "{{ 'a b c'.rsplit(' ', 1) }} {{ 'a b'.rsplit() }} {{ 'a,b'.rsplit(sep=',', maxsplit=1) }}",
    "rstrip": "{{ ' a  '.rstrip() }}|{{ 'a\\n\\n'.rstrip('\\n') }}",
    "split": "{{ text.split() }} {{ messages[2].content.split('</think>') }} {{ 'a,b,c'.split(',', 1) }} {{ 'a'.split('</think>')[-1].lstrip('\\n') }}",
    "splitlines": "{{ 'a\\nb\\r\\nc\\u2028d'.splitlines() }} {{ 'a\\nb'.splitlines(true) }} {{ ''.splitlines() }}",
    "startswith": "{{ text.startswith('The') }} {{ 'ab'.startswith(('x', 'a')) }} {{ 'ab'.startswith('b', 1) }}",
    "strip": "[{{ '  a '.strip() }}] {{ 'xyaxy'.strip('xy') }}",
    "swapcase": "{{ 'aB'.swapcase() }}",
    "title": "{{ 'ab cd'.title() }}",
    "upper": "{{ 'straße'.upper() }}",
}
METHOD_SNIPPETS = {
    "format": "{{ 'a{}b{:>4}{x!r}{y.b}{z[0]}'.format(1, 2, x='q', y=table, z=numbers) }} {{ '{{}} in 2024: {0}{0}'.format(5) }}",
    "format of markup": "{{ ('<{}>'|safe).format('&') }}",
    "format too few": "{{ '{} {}'.format(1) }}",
    "format broken": "{{ '{'.format(1) }}",
    "dict": "{{ table.get('a') }} {{ table.get('zz') }} {{ table.get('zz', 5) }} {{ table.keys()|list }} {{ table.values()|list }} {{ table.items()|list }} {{ table.copy() }}",
    "views": "{{ table.items() is iterable }} {{ 'a' in table.keys() }} {{ table.keys()|length }}",
    "list": "{{ numbers.index(1) }} {{ numbers.count(2) }} {{ numbers.copy() }}",
    "tuple": "{{ (1, 2, 2).index(2) }} {{ (1, 2, 2).count(2) }}",
    "not found": "{{ numbers.index(99) }}",
    "markup": "{{ ('<b>'|safe).upper() }} {{ ('a<'|safe).replace('a', '<') }} {{ ('-'|safe).join(['<', 'a']) }}",
    "method as value": "{{ 'a'.upper is callable }}",
    "through attr": "{{ ('ab'|attr('upper'))() }}",
    "through item": "{{ 'ab'['upper']() }}",
}
REFUSED_BY_BOTH = {
    *("raise", "syntax error", "unknown tag", "unknown filter", "unknown test", "include", "import", "extends", "do"),
    *("wrong types", "division by zero", "call of text", "call of unknown", "add unknown", "loop over number"),
    *(
        "item of unknown",
        "slice of nothing",
        "lazy has no length",
        "json of lazy",
        "json of unknown",
        "json of function",
    ),
    *("sort of mixed", "odd text", "map without arguments", "map to unknown filter", "lazy last", "format too few"),
    *("format broken", "not found"),
}
