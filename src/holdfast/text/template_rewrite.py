"""Rewrites a parsed chat template so that what Jinja compiles to plain Python is metered too; no torch.

  for x in items            ->  for x in items | loop(steps of one round)
  a ~ b        x[1:]        ->  a | concat(b)        x | slice(1, none, none)
  a == b       a in b       ->  (a | compared) == (b | compared)        (a | searched) in (b | searched)
  [a, b]       {k: v}       ->  [a, b] | made        {(k | compared): v} | made
  text         {{ x }}      ->  {{ 'text' | written }}        {{ x | written }}

The names on the right are filters that no template can spell. Bodies of loops, macros and blocks begin with a charge
for their length, so that a long body is not cheaper than a short one.
"""

from collections.abc import Callable, Iterable

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from holdfast.text.template_meter import Metered
from holdfast.text.template_values import MeteredLoop, Value, admit, survey, written_bytes

NODES_A_STEP = 4
"""Parts of a template that run in the time of about one operation."""
HOOK_MARK = "|"
"""What the names of hooks begin with; in the source of a template no name can."""
_LOOP, _CONCAT, _SLICE = "|loop", "|concat", "|slice"
_COMPARED, _SEARCHED, _MADE, _WRITTEN, _SPENT = "|compared", "|searched", "|made", "|written", "|spent"
COMPARED_CHARS_A_STEP = 512
"""Two strings are compared faster than one is searched."""


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks answers for training: here only its content counts."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def rewrite(template: nodes.Template, environment: Environment) -> nodes.Template:
    """The same template, metered."""
    _Metering().visit(template)
    template.set_environment(environment)
    return template


class _Metering(NodeTransformer):
    def get_visitor(self, node: nodes.Node) -> Callable[..., nodes.Node] | None:
        return _VISITORS.get(type(node).__name__, NodeTransformer.generic_visit).__get__(self)

    def loop(self, node: nodes.For) -> nodes.Node:
        round_steps = 1 + (_size([node.test]) if node.test is not None else 0)
        self.body(node)
        node.iter = _filtered(node.iter, _LOOP, [nodes.Const(round_steps)])
        return node

    def body(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        charge = _charge(node, [*node.body, *getattr(node, "defaults", ())])
        otherwise = getattr(node, "else_", [])
        charge_otherwise = _charge(node, otherwise)
        self.generic_visit(node)
        node.body.insert(0, charge)
        if otherwise:
            otherwise.insert(0, charge_otherwise)
        return node

    def output(self, node: nodes.Output) -> nodes.Node:
        written: list[nodes.Expr] = []
        for child in node.nodes:
            is_text = isinstance(child, nodes.TemplateData)
            inner = nodes.Const(child.data).set_lineno(child.lineno) if is_text else self.visit(child)
            written.append(_filtered(inner, _WRITTEN))
        node.nodes = written
        return node

    def concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node.nodes[0], _CONCAT, node.nodes[1:])

    def item(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filtered(node.node, _SLICE, [nodes.Const(None) if end is None else end for end in ends])

    def compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        for holder in (node, *node.ops):
            holder.expr = _looked_at(holder.expr, _SEARCHED if searches else _COMPARED)
        return node

    def pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _looked_at(node.key, _COMPARED)
        return node

    def literal(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        return _filtered(self.generic_visit(node), _MADE)

    def tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE) if node.ctx == "load" else node

    def autoescape(self, node: nodes.Node) -> nodes.Node:
        raise TemplateSyntaxError("autoescape is for web pages", node.lineno)


_VISITORS: dict[str, Callable[..., nodes.Node]] = {
    "For": _Metering.loop,
    "Macro": _Metering.body,
    "CallBlock": _Metering.body,
    "Block": _Metering.body,
    "Output": _Metering.output,
    "Concat": _Metering.concat,
    "Getitem": _Metering.item,
    "Compare": _Metering.compare,
    "Pair": _Metering.pair,
    "List": _Metering.literal,
    "Dict": _Metering.literal,
    "Tuple": _Metering.tuple,
    "ScopedEvalContextModifier": _Metering.autoescape,
}


def _charge(node: nodes.Node, body: Iterable[nodes.Node]) -> nodes.Node:
    steps = nodes.Const(_size(body)).set_lineno(node.lineno)
    return nodes.ExprStmt(_filtered(steps, _SPENT)).set_lineno(node.lineno)


def _size(body: Iterable[nodes.Node]) -> int:
    return 1 + sum(1 for node in body for _ in node.find_all(nodes.Node)) // NODES_A_STEP


def _looked_at(node: nodes.Expr, name: str) -> nodes.Expr:
    is_short = isinstance(node, nodes.Const) and len(str(node.value)) <= 64
    return node if is_short else _filtered(node, name)


def _filtered(node: nodes.Node, name: str, args: Iterable[nodes.Expr] = ()) -> nodes.Filter:
    made = nodes.Filter(node, name, list(args), [], None, None)
    made.set_lineno(node.lineno)
    return made


class _Hooks:
    """What the rewritten template goes through. All ask for the context, so that none runs at compile time."""

    def __init__(self, environment: Metered) -> None:
        self._environment = environment

    @pass_context
    def loop(self, context: Context, value: Value, round_steps: int) -> MeteredLoop:
        return MeteredLoop(self._environment.meter, value, round_steps)

    @pass_context
    def concat(self, context: Context, *values: Value) -> str:
        meter = self._environment.meter
        meter.expect(sum(written_bytes(meter, value) for value in values))
        return admit(meter, "".join(map(str, values)))

    @pass_context
    def slice(self, context: Context, value: Value, start: Value, stop: Value, step: Value) -> Value:
        cut = slice(start, stop, step)
        if isinstance(value, str | list | tuple):
            num_items = len(range(*cut.indices(len(value))))
            self._environment.meter.expect(num_items * (1 if isinstance(value, str) and value.isascii() else 8))
        return admit(self._environment.meter, value[cut])

    @pass_context
    def compared(self, context: Context, value: Value) -> Value:
        if isinstance(value, str):
            self._environment.meter.step(1 + len(value) // COMPARED_CHARS_A_STEP)
        else:
            survey(self._environment.meter, value)
        return value

    @pass_context
    def searched(self, context: Context, value: Value) -> Value:
        survey(self._environment.meter, value)
        return value

    @pass_context
    def made(self, context: Context, value: Value) -> Value:
        self._environment.meter.make(64 + 96 * len(value))
        return value

    @pass_context
    def written(self, context: Context, value: Value) -> str:
        meter = self._environment.meter
        if not isinstance(value, str):
            meter.expect(written_bytes(meter, value))
            value = str(value)
        meter.write(value)
        meter.make_text(len(value), value.isascii())
        return value

    @pass_context
    def spent(self, context: Context, steps: int) -> None:
        self._environment.meter.step(steps)


def hook_filters(environment: Metered) -> dict[str, Callable[..., Value]]:
    """The hooks of one environment, by the names that the rewriting uses."""
    hooks = _Hooks(environment)
    return {
        _LOOP: hooks.loop,
        _CONCAT: hooks.concat,
        _SLICE: hooks.slice,
        _COMPARED: hooks.compared,
        _SEARCHED: hooks.searched,
        _MADE: hooks.made,
        _WRITTEN: hooks.written,
        _SPENT: hooks.spent,
    }
