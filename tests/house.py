"""The rules of the house as functions of source text: what docs/ARCHITECTURE.md says, checkable.

`check_module` reads one file of `src/nanoserve`, `check_tests` one test file; both return
complaints in words, with the line. Nothing is imported and nothing is run, so a bad example in a
test is as easy to judge as the real tree.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

PACKAGE = "nanoserve"

STOREYS: tuple[frozenset[str], ...] = tuple(
    frozenset(rooms.split())
    for rooms in (
        "config request",
        "kernels scheduling planner tokenizer",
        "kv",
        "model",
        "engine chat",
        "llm generate",
        "verify",
        "__init__",  # the package's face: it only re-exports
        "bench server",
        "cli",
        "__main__",
    )
)
"""From the ground up. A room imports from storeys below its own, and from itself."""

ROOMS = {room: height for height, rooms in enumerate(STOREYS) for room in rooms}

STANDARD_LIBRARY_ONLY = frozenset({"config", "request", "scheduling"})
NOTHING_OF_OURS = frozenset({"kernels"})

TORCH_PLACES = (
    "model/gpt2.py",
    "model/pickled.py",
    "kv/",
    "kernels/",
    "generate.py",
    "engine/eager.py",
    "engine/graph.py",
    "bench/peers/huggingface.py",  # another's engine, in a process of its own
)
TERMINAL_ROOMS = {
    "typer": frozenset({"cli"}),
    "rich": frozenset({"cli", "bench", "planner"}),  # the planner makes a table, and prints nothing
}
LIGHT_LIBRARIES = frozenset({"numpy", "tokenizers", "typer", "rich", "torch"})
"""May stand at the top of a module (torch in its places); all else is imported where it is used."""
ROOM_LIBRARIES = {
    "server": frozenset({"fastapi", "prometheus_client", "uvicorn"}),
    "kernels": frozenset({"triton"}),  # whose decorators stand at the top; see LATE_PLACES
}
"""A room that is an extra as a whole may have that extra's libraries at the top, too."""


CLOCKS = frozenset({"time", "timeit"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LatePlace:
    """A function that may import our own code when it is called, and the room it may open."""

    path: str
    function: str
    room: str


LATE_PLACES = (
    # the executor table: an engine brings in the one backend it was asked for
    LatePlace(path="engine/build.py", function="make_executor", room="engine"),
    # Triton is imported when its kernels were chosen
    LatePlace(path="kernels/paged.py", function="load_triton", room="kernels"),
    # .bin files are pickles, and only torch reads those safely
    LatePlace(path="model/weights.py", function="read_bin", room="model"),
    # `from nanoserve import LLM` brings the engine; `nanoserve --help` must not
    LatePlace(path="__init__.py", function="__getattr__", room="llm"),
)
"""Beside these only the body of a command (`cli.py`) imports our own code late."""

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One module that a file imports. `within` are the enclosing functions, outermost first."""

    target: str  # absolute and dotted; "" where it is computed at run time
    line: int
    within: tuple[FunctionNode, ...]
    typing_only: bool

    @property
    def library(self) -> str:
        """The top-level name: `nanoserve`, `torch`, `os`."""
        return self.target.partition(".")[0]

    @property
    def room(self) -> str:
        """Which of our rooms it opens; `__init__` is the package itself."""
        return [*self.target.split("."), "__init__"][1]


def room_of(path: str) -> str:
    """`kv` for `kv/cache.py`, `llm` for `llm.py`; `path` is relative to the package."""
    return PurePosixPath(path).parts[0].removesuffix(".py")


def absolute_targets(path: str, node: ast.ImportFrom) -> Iterator[str]:
    """What `from X import a, b` imports. `from nanoserve import kv` opens kv, not the package."""
    module = node.module or ""
    if node.level:
        folders = (PACKAGE, *PurePosixPath(path).parent.parts)
        kept = folders[: len(folders) - node.level + 1]
        module = ".".join((*kept, module) if module else kept)
    for alias in node.names:
        is_room = module == PACKAGE and alias.name in ROOMS
        yield f"{module}.{alias.name}" if is_room else module


def called_name(node: ast.expr) -> str:
    """`raises` for `pytest.raises(...)`'s callee; "" for what has no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_type_checking(test: ast.expr) -> bool:
    return called_name(test) == "TYPE_CHECKING"


class ImportFinder(ast.NodeVisitor):
    """Collects every import of one module, `import_module` and `__import__` included."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.found: list[Import] = []
        self._within: tuple[FunctionNode, ...] = ()
        self._typing_only = False

    def _add(self, target: str, node: ast.AST) -> None:
        line = getattr(node, "lineno", 0)
        self.found.append(
            Import(target=target, line=line, within=self._within, typing_only=self._typing_only)
        )

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for target in dict.fromkeys(absolute_targets(self.path, node)):
            self._add(target, node)

    def visit_Call(self, node: ast.Call) -> None:
        if called_name(node.func) in {"import_module", "__import__"}:
            name = node.args[0] if node.args else None
            literal = isinstance(name, ast.Constant) and isinstance(name.value, str)
            self._add(name.value if literal else "", node)  # type: ignore[union-attr]
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        before = self._typing_only
        self._typing_only = before or is_type_checking(node.test)
        for child in node.body:
            self.visit(child)
        self._typing_only = before
        for child in (node.test, *node.orelse):
            self.visit(child)

    def _visit_function(self, node: FunctionNode) -> None:
        before = self._within
        self._within = (*before, node)
        self.generic_visit(node)
        self._within = before

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function


def imports_of(path: str, tree: ast.Module) -> list[Import]:
    finder = ImportFinder(path)
    finder.visit(tree)
    return finder.found


def is_command(function: FunctionNode) -> bool:
    """Whether it is the body of a command: decorated with `@app.command(...)`."""
    names = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(called_name(name) == "command" for name in names)


def may_be_lazy(path: str, found: Import) -> bool:
    """Whether our own code may be imported late here: a command's body, or a named place."""
    if room_of(path) == "cli":
        return is_command(found.within[0])
    return any(
        path == place.path and found.within[0].name == place.function and found.room == place.room
        for place in LATE_PLACES
    )


def check_own_import(path: str, found: Import) -> Iterator[str]:
    """Floors: down, or inside the room; at the top of the file, but for the named places."""
    room = room_of(path)
    if found.room not in ROOMS:
        yield f"{found.target} is in no storey of the house"
    elif found.room != room and room in NOTHING_OF_OURS:
        yield f"{room} imports nothing of ours, and this is {found.target}"
    elif found.room != room and ROOMS[found.room] >= ROOMS[room]:
        yield f"{room} may only import from below, and {found.room} is not"
    if found.within and not may_be_lazy(path, found):
        yield f"{found.target} is imported inside a function: own code goes to the top"


def check_library_import(path: str, found: Import) -> Iterator[str]:
    """Torch in its places, the terminal at the top of the house, the heavy ones where used."""
    room, library = room_of(path), found.library
    if room in STANDARD_LIBRARY_ONLY:
        yield f"{room} uses the standard library only, and this is {library}"
    if library == "torch" and not path.startswith(TORCH_PLACES):
        yield f"torch is imported only in {', '.join(TORCH_PLACES)}"
    if library in TERMINAL_ROOMS and room not in TERMINAL_ROOMS[library]:
        yield f"{library} talks to the terminal: {', '.join(sorted(TERMINAL_ROOMS[library]))} only"
    at_the_top = LIGHT_LIBRARIES | ROOM_LIBRARIES.get(room, frozenset())
    if library not in at_the_top and not (found.within or found.typing_only):
        yield f"{library} is not imported at the top of a module, but where it is used"


def check_clock(path: str, found: Import) -> Iterator[str]:
    """One place in `bench` times, so that one place can be wrong about timing."""
    if room_of(path) == "bench" and path != "bench/measure.py" and found.library in CLOCKS:
        yield f"only bench/measure.py reads a clock, and this is {found.library}"


def check_imports(path: str, tree: ast.Module) -> Iterator[str]:
    """Every rule about imports. `path` is relative to the package."""
    if room_of(path) not in ROOMS:
        yield f"{path}:1: this file is in no storey of the house"
        return
    for found in imports_of(path, tree):
        complaints: Iterator[str] = iter(())
        if found.library == PACKAGE:
            complaints = check_own_import(path, found)
        elif not found.target:
            complaints = iter(["an import computed at run time cannot be checked"])
        elif found.library in sys.stdlib_module_names:
            complaints = check_clock(path, found)
        else:
            complaints = check_library_import(path, found)
        yield from (f"{path}:{found.line}: {complaint}" for complaint in complaints)


def third_party_libraries(path: str, source: str) -> set[str]:
    """Top-level names of what one file imports beside ours and the standard library."""
    libraries = {found.library for found in imports_of(path, ast.parse(source))}
    return libraries - {PACKAGE, ""} - sys.stdlib_module_names


def is_broad(exception: ast.expr | None) -> bool:
    """Whether `except <exception>` catches everything, alone or in a tuple."""
    if isinstance(exception, ast.Tuple):
        return any(is_broad(e) for e in exception.elts)
    return exception is None or called_name(exception) in {"Exception", "BaseException"}


def does_nothing(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(s, ast.Pass | ast.Continue)
        or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        for s in body
    )


def check_node(node: ast.AST) -> Iterator[str]:
    """The smells that one node can have."""
    if isinstance(node, FunctionNode):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{node.name} has {length} lines, the limit is {MAX_FUNCTION_LINES}"
    if isinstance(node, ast.ExceptHandler) and is_broad(node.type) and does_nothing(node.body):
        yield "a broad except that does nothing hides every fault"
    if isinstance(node, ast.Call):
        if called_name(node.func) == "suppress" and any(is_broad(a) for a in node.args):
            yield "suppressing everything hides every fault"
        if called_name(node.func) == "hasattr":
            yield "hasattr asks what a thing is; a type or a Protocol says it"
    if isinstance(node, ast.arg) and node.arg == "is_prefill":
        yield "is_prefill: every step is 'advance by q tokens'"


def check_style(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    """The house style, as far as a machine can hold it."""
    if tree.body and ast.get_docstring(tree) is None:
        yield f"{path}:1: no module docstring: what is this room for?"
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{path}:1: {num_lines} lines in one file, the limit is {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        for complaint in check_node(node):
            yield f"{path}:{getattr(node, 'lineno', 1)}: {complaint}"


def check_module(path: str, source: str) -> list[str]:
    """Complaints about one file of the package; `path` is relative to `src/nanoserve`."""
    tree = ast.parse(source)
    return [*check_imports(path, tree), *check_style(path, source, tree)]


ASSERTING_CALLS = frozenset({"raises", "warns", "fail"})
ASSERTING_PREFIXES = ("assert", "check", "expect")


def asserts(function: FunctionNode, asserting_helpers: frozenset[str]) -> bool:
    """Whether a function asserts in its own body or through a helper that does.

    `assert True` and other constants do not count: they cannot fail.
    """
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.Call):
            name = called_name(node.func)
            if name in ASSERTING_CALLS | asserting_helpers or name.startswith(ASSERTING_PREFIXES):
                return True
    return False


def check_tests(path: str, source: str) -> list[str]:
    """Complaints about one test file: a test asserts, and never skips itself half-way."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, FunctionNode)]
    tests = [f for f in functions if f.name.startswith("test")]
    helpers = frozenset(
        f.name for f in functions if f not in tests and asserts(f, asserting_helpers=frozenset())
    )
    complaints = [
        f"{path}:{f.lineno}: {f.name} asserts nothing" for f in tests if not asserts(f, helpers)
    ]
    complaints += [
        f"{path}:{node.lineno}: a test that skips itself hides that its precondition failed"
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and called_name(node.func) in {"skip", "importorskip"}
    ]
    return complaints
