import pytest

from holdfast.errors import TemplateError
from holdfast.text.template_methods import METHODS, STRING_METHODS, method_charge
from text.both_renderers import agree, ours

STRING_SNIPPETS = {
    "capitalize": "{{ 'aB'.capitalize() }}",
    "casefold": "{{ 'ß'.casefold() }}",
    "center": "{{ 'a'.center(5) }}|{{ 'a'.center(4, '-') }}",
    "count": "{{ text.count('o') }} {{ 'aaaa'.count('a', 1, 3) }}",
    "endswith": "{{ text.endswith('É') }} {{ 'ab'.endswith(('x', 'b')) }}",
    "expandtabs": "{{ 'a\\tb'.expandtabs() }}|{{ 'a\\tb'.expandtabs(2) }}|{{ '\\t'.expandtabs(tabsize=3) }}",
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
    "ljust": "{{ 'a'.ljust(3) }}|{{ 'a'.ljust(3, '.') }}",
    "lower": "{{ 'ÀB'.lower() }}",
    "lstrip": "{{ '  a '.lstrip() }}|{{ 'xya'.lstrip('xy') }}",
    "partition": "{{ 'a=b=c'.partition('=') }}",
    "removeprefix": "{{ 'abc'.removeprefix('ab') }}",
    "removesuffix": "{{ 'abc'.removesuffix('bc') }}",
    "replace": "{{ text.replace('quick', 'slow') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ 'ab'.replace('', '-') }}",
    "rfind": "{{ text.rfind('o') }}",
    "rindex": "{{ text.rindex('o') }}",
    "rjust": "{{ 'a'.rjust(3) }}|{{ 'a'.rjust(3, '0') }}",
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
    "zfill": "{{ '-5'.zfill(4) }}",
}
OTHER_SNIPPETS = {
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


def test_every_string_method_is_tried():
    assert STRING_SNIPPETS.keys() == STRING_METHODS.keys()


@pytest.mark.parametrize("source", STRING_SNIPPETS.values(), ids=STRING_SNIPPETS)
def test_a_metered_method_does_what_the_plain_one_does(source):
    assert agree(source) is not None


@pytest.mark.parametrize("source", OTHER_SNIPPETS.values(), ids=OTHER_SNIPPETS)
def test_other_methods_agree(source):
    agree(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.encode() }}",
        "{{ 'a'.translate({}) }}",
        "{{ 'a'.maketrans('a', 'b') }}",
        "{{ '{a}'.format_map({'a': 1}) }}",
        "{{ {}.fromkeys([1]) }}",
        "{{ (5).to_bytes(9, 'big') }}",
        "{{ (5).bit_length() }}",
        "{{ (2.5).hex() }}",
        "{{ ('a'|safe).striptags() }}",
        "{{ ('a'|safe).unescape() }}",
    ],
)
def test_methods_that_are_not_listed_do_not_exist(source):
    with pytest.raises(TemplateError, match="sandbox"):
        ours(source)


def test_only_listed_methods_have_a_cost():
    assert method_charge("a", "upper") is not None
    assert method_charge("a", "encode") is None
    assert method_charge([], "append") is None
    assert method_charge(5, "to_bytes") is None
    assert not any(name.startswith("_") for _, charges in METHODS for name in charges)
