"""Turn plain Python functions, such as a rule's update, into Triton functions.

`translate` parses the function's source, replaces each arithmetic operator with a call to the
function in `rule_math.py` that rounds the same way torch does, and lets Triton compile the result.
It also translates all functions that the original function calls. So each rule needs to be written
only once.
"""
# mypy: ignore-errors
# Triton has no type annotations for compiled functions.

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
import textwrap
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from hotrow.kernels import rule_math as plain_math
from hotrow.kernels.triton import rule_math

_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
}


class _Rewriter(ast.NodeTransformer):
    """Rewrite a function of a rule for Triton."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Replace an arithmetic operator with a call."""
        self.generic_visit(node)
        return _call(node, _OPERATORS[type(node.op)], node.left, node.right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """Replace a minus sign with a call."""
        self.generic_visit(node)
        return _call(node, "negative", node.operand) if isinstance(node.op, ast.USub) else node

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        """Unroll a loop over a tuple."""
        self.generic_visit(node)
        assert isinstance(node.iter, ast.Tuple)
        statements: list[ast.stmt] = []
        for item in node.iter.elts:
            statements += [ast.Assign([node.target], item), *copy.deepcopy(node.body)]
        return statements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Move the code after `if ...: return` to an `else`.

        Otherwise, Triton would compile both paths.
        """
        self.generic_visit(node)
        node.body = _move_to_else(node.body)
        return node


def _move_to_else(body: list[ast.stmt]) -> list[ast.stmt]:
    for i, statement in enumerate(body):
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return):
            statement.orelse = _move_to_else(body[i + 1 :])
            return body[: i + 1]
    return body


def _call(node: ast.AST, name: str, *arguments: ast.expr) -> ast.AST:
    call = ast.Call(ast.Name(name, ast.Load()), list(arguments), [])
    return ast.copy_location(call, node)


@functools.cache
def translate(function: Callable[..., Any]) -> Any:
    """Return the Triton function for a plain function."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    for argument in definition.args.args:
        argument.annotation = None
    module = function.__module__.rpartition(".")[2]
    definition.returns, definition.name = None, f"{module}_{definition.name}"
    source = ast.unparse(ast.fix_missing_locations(_Rewriter().visit(tree))) + "\n"
    scope: dict[str, Any] = {"__name__": function.__module__, "tl": tl, "triton": triton}
    for name in ("add", "subtract", "multiply", "divide", "negative"):
        scope[name] = getattr(rule_math, name)
    scope["abs"] = rule_math.absolute
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if inspect.isfunction(called):
            is_operation = called.__module__ == plain_math.__name__
            scope[name] = getattr(rule_math, name) if is_operation else translate(called)
    return _compile(source, definition.name, scope)


def _compile(source: str, name: str, scope: dict[str, Any]) -> Any:
    """Compile a function with `triton.jit`, which gets the source from `linecache`."""
    file = f"<hotrow triton {name}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    exec(compile(source, file, "exec"), scope)
    return triton.jit(scope[name])
