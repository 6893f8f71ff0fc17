import pytest

from holdfast.errors import TemplateError
from text.both_renderers import agree, ours

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
    "globals": "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{% set j = joiner('; ') %}{{ j() }}x{{ j() }}y{{ dict(a=1)['a'] }}{{ dict([('k', 2)]).k }}",
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


@pytest.mark.parametrize("source", SNIPPETS.values(), ids=SNIPPETS)
def test_a_metered_template_writes_what_a_plain_one_writes(source):
    agree(source)


REFUSED = {
    "raise",
    "syntax error",
    "unknown tag",
    "unknown filter",
    "unknown test",
    "include",
    "import",
    "extends",
    "do",
}
REFUSED |= {
    "wrong types",
    "division by zero",
    "call of text",
    "call of unknown",
    "add unknown",
    "loop over number",
    "item of unknown",
    "slice of nothing",
}


def test_most_of_these_write_something():
    """The comparison above would also pass if both refused everything."""
    assert {name for name, source in SNIPPETS.items() if agree(source) is None} <= REFUSED


def test_autoescape_is_refused():
    with pytest.raises(TemplateError, match="autoescape"):
        ours("{% autoescape true %}{{ '<' }}{% endautoescape %}")


def test_a_long_body_costs_more_than_a_short_one():
    loop = "{{% for a in range(2000) %}}{}{{% endfor %}}"
    assert ours(loop.format("{% if yes %}{% endif %}" * 10)) == ""
    with pytest.raises(TemplateError, match="steps"):
        ours(loop.format("{% if yes %}{% endif %}" * 1000))
