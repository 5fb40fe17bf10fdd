"""Text of the reference pages of the public Python API: signatures, docstrings, fields and values.

The source is parsed and not imported, so a module may need packages that are not installed. A class is shown with its
public methods and fields, an enumeration with its values. The description of a field or a value is, in this order, in
`FIELD_DESCRIPTIONS`, in its `Annotated` type, in the second part of its value, or in the text below it.

A public name without a description is an `UndocumentedName`.
"""

from __future__ import annotations

import ast
import html
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.types import CALL_FIELDS, LIMIT_FIELDS

MAX_SIGNATURE_CHARS = 88
"""A longer signature has a line for each argument, since a code block of a page has room for 100 characters."""
FIELD_DESCRIPTIONS: Mapping[str, Mapping[str, str]] = {
    "Call": CALL_FIELDS,
    "Limits": {name: rule.doc for name, rule in LIMIT_FIELDS.items()},
}
"""Descriptions of the fields of a class that the code has in a table."""
INTERNAL: Mapping[str, Sequence[str]] = {
    "Call": ["decode_defaults", "size"],
    "Episode": ["append_observation", "append_sampled", "tail", "with_tail"],
    "JudgedProgram": ["decode", "encode", "of", "with_id"],
    "JudgedTest": ["decode", "encode", "of"],
    "Limits": ["decode"],
    "Problem": ["with_default_reward"],
    "PythonEnvironment": ["reset", "run_python"],
    "ServiceError": ["with_results"],
    "ToolCall": ["row_fields"],
    "Verdict": ["encode"],
}
"""Methods of public classes that users do not call themselves."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class UndocumentedName(Exception):
    """A public name has no description, or the module does not define it. The message has the file and the line."""


def public_names(root: Path, path: str, names: Sequence[str]) -> str:
    """Return the headings, signatures and descriptions of names that a file defines. Raises `UndocumentedName`."""
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    tree = _WithConstants(tree).visit(tree)
    defined = {_name(node): (node, below) for node, below in _with_text_below(tree.body)}
    parts: list[str] = []
    for name in names:
        if name not in defined:
            raise UndocumentedName(f"{path}:1: expected a definition of the public name {name}")
        parts += [f"### `{name}`", *_Describer(path).definition(name, *defined[name])]
    return "\n\n".join(parts)


@dataclass(frozen=True, slots=True)
class _Describer:
    """Describes the definitions of one file. Each method raises `UndocumentedName`."""

    path: str

    def definition(self, name: str, node: ast.stmt, below: str) -> Iterable[str]:
        """Return the parts below the heading of a name."""
        if isinstance(node, ast.ClassDef):
            return self._class(node)
        if isinstance(node, Function):
            return [_signature(name, node), self._described(name, node, ast.get_docstring(node))]
        assignment = ast.unparse(node).replace("'", '"')  # as `ruff format` writes it
        return [_code_block(assignment), self._described(name, node, below)]

    def _class(self, cls: ast.ClassDef) -> Iterator[str]:
        members = [item for item in _with_text_below(cls.body) if not _name(item[0]).startswith("_")]
        constructor = next((node for node in cls.body if isinstance(node, Function) and node.name == "__init__"), None)
        is_enum = any(ast.unparse(base).endswith("Enum") for base in cls.bases)
        bases = ", ".join(map(ast.unparse, cls.bases))
        if constructor is not None and bases in ("", "ABC"):
            yield _signature(cls.name, constructor)
        elif bases and not is_enum:
            yield _code_block(f"class {cls.name}({bases})")
        yield self._described(cls.name, cls, ast.get_docstring(cls))
        if constructor is not None and (text := ast.get_docstring(constructor)):
            yield text
        if is_enum:
            rows = [self._value_row(cls.name, node, below) for node, below in members if isinstance(node, ast.Assign)]
            yield table(("value", "description"), rows)
            return
        fields = [(node, below) for node, below in members if isinstance(node, ast.AnnAssign)]
        functions = [
            node
            for node, _ in members
            if isinstance(node, Function) and not _has(node, "overload") and node.name not in INTERNAL.get(cls.name, ())
        ]
        rows = [self._field_row(cls.name, node, below) for node, below in fields]
        rows += [self._property_row(cls.name, node) for node in functions if _has(node, "property")]
        if rows:
            yield table(("name", "type", "default", "description"), rows)
        for node in functions:
            if not _has(node, "property"):
                name = f"{cls.name}.{node.name}"
                yield f"#### `{name}`"
                yield _signature(node.name, node)
                yield self._described(name, node, ast.get_docstring(node))

    def _value_row(self, cls: str, node: ast.Assign, below: str) -> Sequence[str]:
        value, *texts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        description = ast.literal_eval(texts[0]) if texts else below
        return f"`{ast.literal_eval(value)}`", self._described(f"{cls}.{_name(node)}", node, description)

    def _field_row(self, cls: str, node: ast.AnnAssign, below: str) -> Sequence[str]:
        name, kind, description = _name(node), node.annotation, FIELD_DESCRIPTIONS.get(cls, {}).get(_name(node), below)
        if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) in ("Annotated", "ClassVar"):
            is_annotated = isinstance(kind.slice, ast.Tuple)
            kind, *texts = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
            description = ast.literal_eval(texts[0]) if is_annotated else description
        default = f"`{_default(node.value)}`" if node.value else "required"
        return f"`{name}`", f"`{ast.unparse(kind)}`", default, self._described(f"{cls}.{name}", node, description)

    def _property_row(self, cls: str, node: Function) -> Sequence[str]:
        kind = ast.unparse(node.returns) if node.returns else ""
        return (
            f"`{node.name}`",
            f"`{kind}`",
            "property",
            self._described(f"{cls}.{node.name}", node, ast.get_docstring(node)),
        )

    def _described(self, name: str, node: ast.stmt, text: str | None) -> str:
        if not text:
            raise UndocumentedName(f"{self.path}:{node.lineno}: expected a description of the public name {name}")
        return text


class _WithConstants(ast.NodeTransformer):
    """Replaces defaults that are constants of the same module by their values."""

    def __init__(self, tree: ast.Module) -> None:
        assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
        self._values = {_name(node): node.value for node in assigned}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. A cell has one line."""
    cells = [[_with_bars(" ".join(cell.split())) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *cells])


def _with_bars(cell: str) -> str:
    """Return a cell whose bars do not end it. Inside of code, GitHub and the site agree only on an HTML entity."""
    with_code = re.sub(r"`([^`]*\|[^`]*)`", lambda code: f"<code>{html.escape(code[1])}</code>", cell)
    return with_code.replace("|", "&#124;")


def _with_text_below(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement with the text below it, which describes a constant, a field or a value."""
    for node, following in zip(body, [*body[1:], None], strict=True):
        value = following.value if isinstance(following, ast.Expr) else None
        text = value.value if isinstance(value, ast.Constant) else None
        yield node, inspect.cleandoc(text) if isinstance(text, str) else ""


def _name(node: ast.stmt) -> str:
    """Return the name that a statement defines, or an empty text."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return ""


def _has(function: Function, decorator: str) -> bool:
    return any(ast.unparse(each) == decorator for each in function.decorator_list)


def _default(value: ast.expr) -> str:
    """Return a default as a reader writes it: `{}` for `field(default_factory=dict)`."""
    match value:
        case ast.Call(func=ast.Name(id="field"), keywords=[ast.keyword(arg="default_factory", value=factory), *_]):
            return {"dict": "{}", "list": "[]"}.get(ast.unparse(factory), f"{ast.unparse(factory)}()")
    return ast.unparse(value)


def _signature(name: str, function: Function) -> str:
    """Return a code block with the signature, without `self` and `cls`."""
    arguments = list(_arguments(function.args))
    returns = f" -> {ast.unparse(function.returns)}" if function.returns and function.name != "__init__" else ""
    start = f"{'async ' if isinstance(function, ast.AsyncFunctionDef) else ''}{name}"
    line = f"{start}({', '.join(arguments)}){returns}"
    if len(line) > MAX_SIGNATURE_CHARS:
        lines = "".join(f"    {each},\n" for each in arguments)
        line = f"{start}(\n{lines}){returns}"
    return _code_block("@asynccontextmanager\n" + line if _has(function, "asynccontextmanager") else line)


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """Yield the arguments of a signature one by one, without `self` and `cls`."""
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(arguments.args, defaults, strict=True):
        if argument.arg not in ("self", "cls"):
            yield _argument(argument, default)
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, default)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")


def _code_block(text: str) -> str:
    return f"```python\n{text}\n```"
