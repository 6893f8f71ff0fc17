import pytest
from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from holdfast.errors import TemplateError
from holdfast.text.template_filters import FILTER_CHARGES
from text.both_renderers import agree, ours

LEFT_OUT = {"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}
FILTER_SNIPPETS = {
    "abs": "{{ -3|abs }} {{ -2.5|abs }}",
    "attr": "{{ table|attr('items') is callable }} {{ table|attr('zz') is defined }}",
    "batch": "{{ numbers|batch(3, 'x')|list }} {{ numbers|batch(2)|list }}",
    "capitalize": "{{ 'aBC d'|capitalize }} {{ 5|capitalize }}",
    "center": "{{ 'a'|center(7) }}| {{ 'a'|center }}|",
    "count": "{{ text|count }} {{ numbers|count }}",
    "d": "{{ unknown|d('x') }} {{ ''|d('x', true) }}",
    "default": "{{ unknown|default }} {{ nothing|default('x') }} {{ nothing|default('x', boolean=true) }} {{ 0|default(5) }}",
    "dictsort": "{{ table|dictsort }} {{ table|dictsort(true) }} {{ table|dictsort(false, 'value', reverse=true) }}",
    "e": "{{ text|e }}",
    "escape": "{{ text|escape }} {{ ('<'|safe)|escape }}",
    "filesizeformat": "{{ 123456|filesizeformat }} {{ 123456|filesizeformat(true) }} {{ '77'|filesizeformat }}",
    "first": "{{ numbers|first }} {{ text|first }} {{ []|first }} {{ messages|map(attribute='role')|first }}",
    "float": "{{ '2.50'|float }} {{ 'x'|float }} {{ 'x'|float(1.5) }} {{ 3|float }}",
    "forceescape": "{{ ('<'|safe)|forceescape }}",
    "format": "{{ '%s-%05.1f-%d%%'|format('a', 2.25, 7) }} {{ '%(a)s'|format(a=1) }}",
    "groupby": "{% for g in rows|groupby('k') %}{{ g.grouper }}:{{ g.list|length }} {{ g[0] }};{% endfor %}",
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
    "random": "{{ [5]|random }} {{ []|random }}",
    "reject": "{{ numbers|reject('odd')|list }} {{ [0, 1, '', 'a']|reject|list }}",
    "rejectattr": "{{ rows|rejectattr('n')|list }} {{ messages|rejectattr('role', 'equalto', 'user')|map(attribute='role')|list }}",
    "replace": "{{ text|replace('q', 'Q') }} {{ 'aaa'|replace('a', 'b', 2) }} {{ 'ab'|replace('', '-') }} {{ 15|replace('1', 'x') }}",
    "reverse": "{{ 'abc'|reverse }} {{ numbers|reverse|list }}",
    "round": "{{ 2.567|round }} {{ 2.567|round(2) }} {{ 2.5|round(method='floor') }} {{ 2.1|round(0, 'ceil')|int }} {{ 7|round }}",
    "safe": "{{ '<b>'|safe }} {{ [1]|safe }}",
    "select": "{{ numbers|select('odd')|list }} {{ numbers|select('greaterthan', 1)|list }} {{ [0, 1]|select|list }}",
    "selectattr": "{{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ rows|selectattr('n')|map(attribute='n')|list }} {{ messages|selectattr('tool_calls', 'defined')|list|length }}",
    "slice": "{{ numbers|slice(3)|list }} {{ numbers|slice(3, 'x')|list }}",
    "sort": "{{ numbers|sort }} {{ numbers|sort(reverse=true) }} {{ words|sort }} {{ words|sort(case_sensitive=true) }} {{ rows|sort(attribute='n,k')|map(attribute='n')|list }}",
    "string": "{{ 5|string + 'x' }} {{ [1]|string }} {{ none|string }}",
    "sum": "{{ numbers|sum }} {{ rows|sum(attribute='n') }} {{ [1.5, 2]|sum(start=10) }} {{ []|sum }}",
    "title": "{{ 'hello wORLD foo-bar (baz)'|title }}",
    "tojson": "{{ messages|tojson }} {{ table|tojson(indent=2) }} {{ 'é<>&\\'\"'|tojson }} {{ 'é'|tojson(ensure_ascii=true) }} {{ table|tojson(sort_keys=true, separators=(',', ':')) }} {{ none|tojson }}",
    "trim": "[{{ '  a b \\n'|trim }}] {{ 'xxaxx'|trim('x') }} {{ 5|trim }}",
    "truncate": "{{ text|truncate(9) }} {{ text|truncate(9, true, '..', 0) }}",
    "unique": "{{ numbers|unique|list }} {{ words|unique|list }} {{ words|unique(true)|list }} {{ rows|unique(attribute='k')|list|length }}",
    "upper": "{{ 'straße'|upper }}",
    "urlencode": "{{ 'a b/é?'|urlencode }} {{ table|urlencode }}",
    "wordcount": "{{ text|wordcount }}",
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
    "sum of text": "{{ words|sum }}",
    "round of text": "{{ 'a'|round }}",
    "odd text": "{{ 'a' is odd }}",
    "batch of none": "{{ numbers|batch }}",
    "map without arguments": "{{ numbers|map|list }}",
    "map to unknown filter": "{{ numbers|map('magic')|list }}",
    "chain": "{{ messages|map(attribute='content')|map('trim')|map('length')|list|join('-') }}",
    "dynamic arguments": "{{ 'aXb'|replace(*['X', '-']) }} {{ '%(a)s'|format(**{'a': 1}) }}",
}


def test_every_filter_and_test_is_tried():
    assert FILTER_SNIPPETS.keys() == FILTERS.keys() - LEFT_OUT == FILTER_CHARGES.keys()
    assert TEST_SNIPPETS.keys() == TESTS.keys()


@pytest.mark.parametrize("source", FILTER_SNIPPETS.values(), ids=FILTER_SNIPPETS)
def test_a_metered_filter_does_what_the_plain_one_does(source):
    assert agree(source) is not None


@pytest.mark.parametrize("source", TEST_SNIPPETS.values(), ids=TEST_SNIPPETS)
def test_a_metered_test_says_what_the_plain_one_says(source):
    assert agree(source) is not None


@pytest.mark.parametrize("source", CORNERS.values(), ids=CORNERS)
def test_corners_agree(source):
    agree(source)


@pytest.mark.parametrize("name", sorted(LEFT_OUT))
def test_filters_without_a_bound_do_not_exist(name):
    with pytest.raises(TemplateError, match=f"No filter named '{name}'"):
        ours("{{ text|" + name + " }}")
