"""Return every small change of a module that a test should notice.

    if self.rounds < 2:        comparison    if self.rounds <= 2:
    rows * block               arithmetic    rows / block
    first and last             boolean       first or last
    seed=0, True               constant      seed=1, False
    if not ready:  if ready:   not           if ready:  if not ready:
    return rows                return        return None
    queue.close()              call, raise   pass

Annotations, decorators, strings and f-strings stay: most changes there break nothing that a user
sees.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_OTHER: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.BitXor: ast.BitAnd, ast.And: ast.Or,
    ast.Or: ast.And,
}  # fmt: skip
_LEFT = ("annotation", "returns", "decorator_list", "type_params")
_WITHOUT_EFFECT = {"strict", "stacklevel"}  # keywords whose value a caller hardly ever sees


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    Attributes:
        function: qualified name of the function or class that holds it; "" outside of any.
        before, after: the changed line, as `ast.unparse` writes it.
        source: the whole changed module.
        ordinal: which of the function's equal changes of equal lines it is.
    """

    function: str
    before: str
    after: str
    source: str
    ordinal: int

    @property
    def key(self) -> str:
        """Eight digits that stay the same while the function's name and the changed line do."""
        words = f"{self.function}\n{self.before}\n{self.after}\n{self.ordinal}"
        return hashlib.sha256(words.encode()).hexdigest()[:8]

    def __str__(self) -> str:
        return f"{self.function}: {self.before}  ->  {self.after}"


def mutants(source: str) -> list[Mutant]:
    """Return the mutants of a module's source."""
    tree = ast.parse(source)
    lines = ast.unparse(tree).splitlines()
    found, equal = [], Counter[tuple[str, str, str]]()
    for parent, field, holder, key, function in _places(tree, ""):
        node = holder[key]
        for other in _changes(parent, field, node):
            holder[key] = other
            changed = ast.unparse(tree)
            holder[key] = node
            pairs = zip(lines, changed.splitlines(), strict=False)
            before, after = next((a.strip(), b.strip()) for a, b in pairs if a != b)
            twin = function, before, after
            found.append(Mutant(*twin, changed, equal[twin]))
            equal[twin] += 1
    return found


def _places(node: ast.AST, function: str) -> Iterator[tuple[ast.AST, str, Any, Any, str]]:
    """Yield each part that may change: its parent, its field, what holds it by what, in what."""
    for field, value in ast.iter_fields(node):
        holder: Any = value if isinstance(value, list) else vars(node)
        for key in range(len(value)) if isinstance(value, list) else [field]:
            part = holder[key]
            if (
                field in _LEFT
                or not isinstance(part, ast.AST)
                or isinstance(part, ast.JoinedStr)
                or (isinstance(part, ast.keyword) and part.arg in _WITHOUT_EFFECT)
            ):
                continue
            yield node, field, holder, key, function
            inside = function
            if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inside = f"{function}.{part.name}".removeprefix(".")
            yield from _places(part, inside)


def _changes(parent: ast.AST, field: str, node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.operator() | ast.cmpop() | ast.boolop():
            formats = isinstance(node, ast.Mod) and isinstance(
                getattr(parent, "left", None), ast.Constant
            )
            if type(node) in _OTHER and not formats:
                yield _OTHER[type(node)]()
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Return(value=ast.AST()) if not _is_none(node.value):
            yield ast.Return(ast.Constant(None))
        case ast.Raise() | ast.Expr(value=ast.Call() | ast.Await()):
            yield ast.Pass()
    chooses = isinstance(parent, (ast.If, ast.IfExp, ast.While, ast.comprehension))
    plain = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    if chooses and plain and field in ("test", "ifs"):
        yield ast.UnaryOp(ast.Not(), node)


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
