"""Programmatic dependent launch (PDL): the source of every kernel that starts early waits before it touches what others write.

A kernel with PDL starts while its predecessor still runs. Its completion implies that of all kernels before it only if every
program waits, whatever branch it takes. The checks read the source, so they hold for kernels that no CPU can run too.
"""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"
CONSTANT = {
    "attention": {
        "p_tiles",
        "p_rows",
        "p_pages",
        "p_near_pages",
        "p_runs",
        "p_slots",
        "p_near_slots",
        "p_q_norm",
        "p_k_norm",
        "p_k_mean",
        "p_pair_scale",
        "p_rotation",
        "p_near",
    },
    "latent": {
        *("p_tiles", "p_rows", "p_pages", "p_slots", "p_states", "p_positions", "p_table_rows", "p_num_tokens"),
        *("p_w", "p_norm", "p_bias"),
    },
    "gemm": {
        *("p_weight", "p_codes", "p_words", "p_scales"),
        *("p_extra", "p_mins", "p_zeros", "p_d", "p_dmin", "p_second"),
    },
    "norm": {"p_weight"},
    "moe": {"p_weight", "p_scales", "p_router", "p_norm_weight", "p_shared_weight", "p_shared_scales"},
    "hyper_connections": {"p_weight", "p_bias", "p_scale"},
    "state": {"p_weight", "p_log_rate"},
}
"""By package, what kernels may read before they wait: weights, and what the host copied before the step."""
TRUSTED = {
    "moe.expert_row._down_kernel": ({"p_ids", "p_shares"}, "moe.deep_gemv._deep_gemv_kernel"),
    "latent.top_k_tokens._filter_kernel": ({"p_scores"}, "latent.top_k_tokens._limit_kernel"),
    "gemm.packed_gemv.packed_gemv_kernel": ({"p_ids"}, "gemm.packed_gemv.packed_gemv_kernel"),
    "gemm.packed_mma.packed_mma_kernel": ({"p_pairs", "p_experts"}, "gemm.packed_mma.packed_mma_kernel"),
}
"""Kernels that read more before they wait, and the kernel before them, which must trigger them after its own wait."""
ALWAYS = {"NUM_HEADS > 0"}
"""Conditions without an else that hold for every program that comes to them."""
FLAGS = {"gemm.packed_gemv.packed_gemv_kernel": "GATED", "gemm.packed_mma.packed_mma_kernel": "WAITS_LATE"}
"""A flag of a kernel that moves its wait: paths are followed with it and without."""


class State(NamedTuple):
    """What every path up to a place has done."""

    has_waited: bool = False
    has_triggered: bool = False

    def __and__(self, other: "State") -> "State":
        return State(self.has_waited and other.has_waited, self.has_triggered and other.has_triggered)


class Module(NamedTuple):
    name: str
    functions: dict[str, ast.FunctionDef]
    imports: dict[str, tuple[str, str]]


@cache
def modules() -> dict[str, Module]:
    """All modules of kernels, by their full name."""
    found = {}
    for path in sorted((SOURCE / "kernels").rglob("*.py")):
        body = ast.parse(path.read_text()).body
        parts = path.relative_to(SOURCE).with_suffix("").parts
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        imports = {
            name.asname or name.name: (node.module or "", name.name)
            for node in body
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        full = ".".join(("holdfast", *parts))
        found[full] = Module(full, functions, imports)
    return found


def is_jitted(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def find(module: Module, name: str) -> tuple[Module, ast.FunctionDef] | None:
    """The jitted function that a name means in a module."""
    if name in module.functions:
        return (module, module.functions[name]) if is_jitted(module.functions[name]) else None
    where = module.imports.get(name)
    return find(modules()[where[0]], where[1]) if where and where[0] in modules() else None


@cache
def kernels() -> dict[str, tuple[Module, ast.FunctionDef]]:
    """Every kernel that takes PDL, by its short name; functions that other kernels call are no kernels."""
    taking, called = {}, set()
    for module in modules().values():
        for function in filter(is_jitted, module.functions.values()):
            short = module.name.removeprefix("holdfast.kernels.")
            if any(argument.arg == "PDL" for argument in function.args.args):
                taking[f"{short}.{function.name}"] = module, function
            for name in {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}:
                if target := find(module, name):
                    called.add(f"{target[0].name.removeprefix('holdfast.kernels.')}.{target[1].name}")
    return {name: kernel for name, kernel in taking.items() if name not in called}


class Walk:
    """All paths through a kernel with PDL: what is read or written before the wait, and ends without one."""

    def __init__(self, name: str) -> None:
        self.early_reads: set[str] = set()
        self.early_writes: list[str] = []
        self.unwaited_ends: list[str] = []
        self.triggers_early = False
        self.tuples: dict[str, ast.Tuple] = {}
        module, function = kernels()[name]
        flag = FLAGS.get(name)
        for self._flags in [{}] if flag is None else [{flag: True}, {flag: False}]:
            roots = {argument.arg: frozenset({argument.arg}) for argument in function.args.args}
            for state, line in self._function(module, function, roots, State()):
                if not state.has_waited:
                    self.unwaited_ends.append(f"{name} line {line}")

    def _function(
        self, module: Module, function: ast.FunctionDef, roots: dict[str, frozenset[str]], state: State
    ) -> list[tuple[State, int]]:
        """The state at every end; `roots` are the kernel's arguments that each of the function's comes from."""
        ends: list[tuple[State, int]] = []
        last = self._block(module, function.body, roots, state, ends)
        return [*ends, (last, function.end_lineno or 0)] if last is not None else ends

    def _block(
        self,
        module: Module,
        body: list[ast.stmt],
        roots: dict[str, frozenset[str]],
        state: State,
        ends: list[tuple[State, int]],
    ) -> State | None:
        """The state behind some statements; None if all paths have returned."""
        for statement in body:
            if isinstance(statement, ast.If):
                after = self._branches(module, statement, roots, state, ends)
                if after is None:
                    return None
                state = after
            elif isinstance(statement, ast.For | ast.While):
                head = statement.iter if isinstance(statement, ast.For) else statement.test
                state = self._expression(module, head, roots, state)
                after = self._block(module, statement.body, roots, state, ends)
                if "static_range" in ast.unparse(head) and after is not None:
                    state = after  # all others may run no turn at all
            else:
                state = self._expression(module, statement, roots, state)
                if isinstance(statement, ast.Assign | ast.AugAssign):
                    _assign(statement, roots)
                if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Tuple):
                    self.tuples[ast.unparse(statement.targets[0])] = statement.value
                if isinstance(statement, ast.Return):
                    ends.append((state, statement.lineno))
                    return None
        return state

    def _branches(
        self,
        module: Module,
        branch: ast.If,
        roots: dict[str, frozenset[str]],
        state: State,
        ends: list[tuple[State, int]],
    ) -> State | None:
        test = ast.unparse(branch.test)
        is_negated, flag = test.startswith("not "), test.removeprefix("not ")
        if flag in self._flags:
            body = branch.body if self._flags[flag] != is_negated else branch.orelse
            return self._block(module, body, roots, state, ends)
        state = self._expression(module, branch.test, roots, state)
        taken = self._block(module, branch.body, roots, state, ends)
        if test == "PDL" or test in ALWAYS:
            return taken
        other = self._block(module, branch.orelse, roots, state, ends)
        if taken is None or other is None:
            return other if taken is None else taken
        return taken & other

    def _expression(self, module: Module, node: ast.AST, roots: dict[str, frozenset[str]], state: State) -> State:
        for call in reversed([call for call in ast.walk(node) if isinstance(call, ast.Call)]):
            state = self._call(module, call, roots, state)
        return state

    def _call(self, module: Module, call: ast.Call, roots: dict[str, frozenset[str]], state: State) -> State:
        name = ast.unparse(call.func)
        kind = ast.unparse(call.args[0]) if name.endswith("inline_asm_elementwise") else name.rpartition(".")[2]
        if kind in ("gdc_wait", "WAIT"):
            return state._replace(has_waited=True)
        if kind in ("gdc_launch_dependents", "LAUNCH_DEPENDENTS"):
            self.triggers_early |= not state.has_waited
            return state._replace(has_triggered=True)
        if name in ("tl.load", "gl.load") and not state.has_waited:
            self.early_reads |= _roots_of(call.args[0], roots)
        if (name in ("tl.store", "gl.store") or "atomic_" in kind) and not state.has_waited:
            self.early_writes.append(f"{module.name} line {call.lineno}")
        if name == "gl.warp_specialize":
            assert isinstance(call.args[0], ast.List), f"{module.name} line {call.lineno}"
            for part in call.args[0].elts:
                assert isinstance(part, ast.Tuple), ast.unparse(part)
                given = self.tuples.get(ast.unparse(part.elts[1]), part.elts[1])
                assert isinstance(given, ast.Tuple), ast.unparse(part)
                self._inside(module, ast.unparse(part.elts[0]), given.elts, [], roots, state)
            return state
        return self._inside(module, name, call.args, call.keywords, roots, state)

    def _inside(
        self,
        module: Module,
        name: str,
        arguments: list[ast.expr],
        keywords: list[ast.keyword],
        roots: dict[str, frozenset[str]],
        state: State,
    ) -> State:
        """The state behind the call of another jitted function."""
        target = find(module, name)
        if target is None:
            return state
        names = [argument.arg for argument in target[1].args.args]
        given = dict(zip(names, arguments, strict=False)) | {one.arg: one.value for one in keywords if one.arg}
        own = {name: _roots_of(value, roots) for name, value in given.items()}
        for end, _ in (ends := self._function(*target, own, state)):
            state = end if end is ends[0][0] else state & end
        return state


def _roots_of(node: ast.AST, roots: dict[str, frozenset[str]]) -> frozenset[str]:
    """The pointers among the kernel's arguments that an expression is made of; what was loaded is no pointer."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "gl.load"):
        return frozenset()
    own = roots.get(node.id, frozenset()) if isinstance(node, ast.Name) else frozenset()
    own = own.union(*(_roots_of(child, roots) for child in ast.iter_child_nodes(node)))
    return frozenset(name for name in own if name.startswith("p_"))


def _assign(statement: ast.Assign | ast.AugAssign, roots: dict[str, frozenset[str]]) -> None:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    found = _roots_of(statement.value, roots)
    for name in [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]:
        roots[name] = found | (roots.get(name, frozenset()) if isinstance(statement, ast.AugAssign) else frozenset())


@cache
def walk(name: str) -> Walk:
    return Walk(name)


def test_pdl_kernels_are_all_found():
    assert len(kernels()) >= 55
    assert set(TRUSTED) <= set(kernels())


@pytest.mark.parametrize("name", sorted(kernels()))
def test_pdl_kernel_waits_in_every_program(name):
    assert walk(name).unwaited_ends == [], "a program may end without a wait, and its successors count on one"
    assert walk(name).early_writes == [], "a predecessor may still read or write what is written before the wait"


@pytest.mark.parametrize("name", sorted(kernels()))
def test_pdl_kernel_reads_constants_before_its_wait(name):
    more, before = TRUSTED.get(name, (set(), None))
    assert walk(name).early_reads <= CONSTANT.get(name.partition(".")[0], set()) | more
    if before is not None:
        assert not walk(before).triggers_early, f"{before} triggers {name} before what it reads is complete"


def test_pdl_launch_names_it_to_the_kernel():
    """A launch with the attribute and a kernel without its wait would race; the other way round the wait is idle."""
    for module in modules().values():
        for function in module.functions.values():
            if is_jitted(function) or function.name == "pdl_launch":
                continue
            nodes = list(ast.walk(function))
            asks = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "pdl_launch"]
            tells = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "PDL"]
            for node in [node for node in nodes if isinstance(node, ast.Dict)]:
                named = zip(node.keys, node.values, strict=True)
                tells += [value for key, value in named if key is not None and ast.unparse(key) == "'PDL'"]
            wanted = {ast.unparse(node.args[0]) for node in asks}
            assert {ast.unparse(one) for one in tells} == wanted, f"{module.name}.{function.name}"
