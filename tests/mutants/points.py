"""Return every small change of a module that a test should notice.

    if self.rounds < 2:        comparison    if self.rounds <= 2:
    rows * block               arithmetic    rows / block
    first and last             boolean       first or last
    seed=0, True               constant      seed=1, False
    if not ready:  if ready:   not           if ready:  if not (ready):
    return rows                return        return None
    queue.close()              call, raise   pass

Annotations, decorators, strings and f-strings are left as they are: most changes there break
nothing that a user sees.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "mutants"]

_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_COMPUTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.BitXor: ("^", "&"),
}
_WITHOUT_EFFECT = {"strict", "stacklevel"}  # keywords whose value a caller hardly ever sees


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    Attributes:
        function: qualified name of the function or class that holds it; "" outside of any.
        line: where it stands now, counted from 1.
        before, after: the changed lines, without margins and comments.
        source: the whole changed module.
        span: first and last line of ``function``.
        ordinal: which of the function's equal changes of equal lines it is.
    """

    function: str
    line: int
    before: str
    after: str
    source: bytes
    span: tuple[int, int]
    ordinal: int = 0

    @property
    def key(self) -> str:
        """Eight digits that stay the same while the function's name and the changed lines do."""
        words = f"{self.function}\n{self.before}\n{self.after}\n{self.ordinal}"
        return hashlib.sha256(words.encode()).hexdigest()[:8]

    @property
    def text(self) -> str:
        """What changes where, without the line's number."""
        return f"{self.function}: {self.before}  ->  {self.after}"

    def __str__(self) -> str:
        return f"{self.key} {self.line} {self.text}"


def mutants(source: bytes) -> list[Mutant]:
    """Return the mutants of a module's source that compile, in the order of its lines."""
    found, equal = [], Counter[tuple[str, str, str]]()
    places = _Places(source)
    for begin, end, text, scope in sorted(places.edits(), key=lambda edit: edit[:2]):
        changed = source[:begin] + text.encode() + source[end:]
        try:
            ast.parse(changed)
        except SyntaxError:
            continue
        line = source.count(b"\n", 0, begin) + 1
        first = source.rfind(b"\n", 0, begin) + 1
        before = _stripped(source[first:], end - first)
        after = _stripped(changed[first:], begin + len(text.encode()) - first)
        name, span = scope
        twin = name, before, after
        found.append(Mutant(name, line, before, after, changed, span, equal[twin]))
        equal[twin] += 1
    return found


def _stripped(text: bytes, until: int) -> str:
    """The lines of ``text`` up to that with byte ``until``, without margins and comments."""
    end = text.find(b"\n", max(until, 0))
    lines = (text if end < 0 else text[:end]).decode().splitlines()
    return " ".join(re.sub(r"\s+# .*", "", line).strip() for line in lines)


_Scope = tuple[str, tuple[int, int]]
_Edit = tuple[int, int, str, _Scope]  # bytes to replace, their replacement, where they stand


class _Places:
    """Walks a module for the bytes that a mutant replaces."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def edits(self) -> Iterator[_Edit]:
        """Yield every change, in any order."""
        yield from self._walk(ast.parse(self._source), ("", (1, 1)))

    def _walk(self, node: ast.AST, scope: _Scope) -> Iterator[_Edit]:
        for begin, end, text in self._of(node):
            yield begin, end, text, scope
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            outer, _ = scope
            name = f"{outer}.{node.name}".removeprefix(".")
            scope = name, (node.lineno, node.end_lineno or node.lineno)
        for child in _children(node):
            yield from self._walk(child, scope)

    def _of(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, right, operator in zip(sides, sides[1:], node.ops, strict=False):
                yield from self._between(left, right, *_COMPARED[type(operator)])
        elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
            if not (isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant)):
                yield from self._between(node.left, node.right, *_COMPUTED[type(node.op)])
        elif isinstance(node, ast.AugAssign) and type(node.op) in _COMPUTED:
            old, new = _COMPUTED[type(node.op)]
            yield from self._between(node.target, node.value, f"{old}=", f"{new}=")
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between(left, right, old, new)
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            changed = not node.value if type(node.value) is bool else node.value + 1
            yield (*self._span(node), repr(changed))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            begin = self._span(node)[0]
            yield begin, begin + len("not "), ""
        elif isinstance(node, ast.Return) and not _is_none(node.value):
            yield (*self._span(node), "return None")
        elif isinstance(node, ast.Raise) or (
            isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))
        ):
            yield (*self._span(node), "pass")
        for condition in _conditions(node):
            if isinstance(condition, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
                begin, end = self._span(condition)
                yield begin, end, f"not ({self._source[begin:end].decode()})"

    def _between(
        self, left: ast.expr, right: ast.expr, old: str, new: str
    ) -> Iterator[tuple[int, int, str]]:
        """The operator between two operands, past brackets and comments."""
        begin, end = self._span(left)[1], self._span(right)[0]
        gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self._source[begin:end])
        words = rb"\s+".join(map(re.escape, old.encode().split()))
        found = re.search(words, gap)
        if found is not None:
            yield begin + found.start(), begin + found.end(), new

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        return begin, self._starts[node.end_lineno - 1] + node.end_col_offset


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else []


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that a mutant may change."""
    if isinstance(node, ast.JoinedStr):
        return  # before Python 3.12 the places in it are wrong
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if isinstance(node, ast.keyword) and node.arg in _WITHOUT_EFFECT:
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield part
