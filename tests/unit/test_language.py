"""Language of pages, error messages and docstrings: the words of CONTRIBUTING.md, short sentences, valid references."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsed_modules import parse_source

ROOT = Path(__file__).parents[2]
PAGES = {str(page.relative_to(ROOT)): page for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]}
MODULES = sorted((ROOT / "dtensor").rglob("*.py"))
SHARED_FILE_NAMES = {"sharded_tensor", "device_mesh", "style", "indexing"}  # in several folders
MOST_ONE_WORD, LEAST_MEAN = 0.25, 12  # of the names of functions: share with one word, mean number of characters
PARAGRAPH, CELL, SENTENCE, CODE = 100, 40, 30, 84  # most words, words, words, columns
OPENINGS = ("What ", "Who", "The same", "It ", "Its ", "Of ", "That ", "As ", "Those ", "One ", "Some ")

_FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^(?:\s*[-*] |\s*\d+\. )", re.MULTILINE)


def banned_pattern() -> re.Pattern[str]:
    """Return a pattern of the words on the left of the list in CONTRIBUTING.md."""
    lines = re.search(r"```words\n(.*?)```", PAGES["CONTRIBUTING.md"].read_text(), re.DOTALL)[1].splitlines()
    words = [word.strip() for line in lines for word in line.partition("->")[0].split(",")]
    return re.compile(rf"(?<![\w-])({'|'.join(sorted(map(re.escape, words), key=len, reverse=True))})(?![\w-])", re.IGNORECASE)


BANNED = banned_pattern()


def without_code(text: str) -> str:
    """Return a line or paragraph without inline code, link targets and HTML tags."""
    return re.sub(r"<[^>]*>", "", re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`x`", text)))


def page_problems(page: str, longest: int = PARAGRAPH) -> Iterator[str]:
    """Yield each banned word, long paragraph, long cell, long sentence and long code line, with its line number."""
    for fence in _FENCE.finditer(page):
        if fence["kind"].split()[:1] in (["python"], ["sh"], ["bash"]):
            first = page.count("\n", 0, fence.start()) + 2
            session = ">>> " in fence["text"]
            for number, line in enumerate(fence["text"].splitlines(), first):
                if len(line) > CODE and (not session or line.startswith((">>> ", "... "))):  # not what a session prints
                    yield f"{number}: code of {len(line)} columns"
    prose = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page)
    for number, line in enumerate(prose.splitlines(), 1):
        yield from (f"{number}: {found[0]!r} is in the list of CONTRIBUTING.md" for found in BANNED.finditer(without_code(line)))
        if line.startswith("|"):
            yield from (f"{number}: a cell of {len(cell.split())} words" for cell in line.split("|") if len(cell.split()) > CELL)
    for block in re.finditer(r"(?:^(?![|#>\n<]).+\n?)+", prose, re.MULTILINE):
        number = prose.count("\n", 0, block.start()) + 1
        for paragraph in map(without_code, _ITEM.split(block[0])):
            if len(paragraph.split()) > longest:
                yield f"{number}: a paragraph of {len(paragraph.split())} words"
            for sentence in re.split(r"(?<=[.!?:])\s+", paragraph):
                if len(sentence.split()) > SENTENCE:
                    yield f"{number}: a sentence of {len(sentence.split())} words: {sentence[:60]}"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_page_has_no_banned_words_and_no_long_paragraphs_sentences_or_cells(name: str) -> None:
    assert not list(page_problems(PAGES[name].read_text(), 60 if name == "README.md" else PARAGRAPH))


def test_readme_and_changelog_are_within_size_limits() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "CHANGELOG.md").read_bytes()) < 6_000


def test_page_problems_finds_each_kind_of_problem() -> None:
    words, cell = "word " * 31, "word " * 41
    page = (
        f"The peer lies.\n\n{words}\n\n{'word. ' * 101}\n\n| {cell} |\n\n```python\n{'x' * 85}\n```\n```text\n{'x' * 85}\n```\n"
    )
    found = list(page_problems(page))
    assert [problem.partition(":")[0] for problem in found] == ["10", "1", "1", "7", "3", "5"]
    assert not list(page_problems("A `peer` in code, and [a link](peer.md).\n"))


# --- code -----------------------------------------------------------------------------------------------------------
@functools.cache
def module_trees() -> dict[Path, ast.Module]:
    return {path: parse_source(path.read_text()) for path in MODULES}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield node.lineno, text


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the constant text of each ``raise Error(...)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def banned_in_messages() -> Iterator[str]:
    for path, tree in module_trees().items():
        for line, text in messages(tree):
            yield from (f"{path}:{line} {found[0]!r}" for found in BANNED.finditer(re.sub(r"`[^`]*`", "", text)))


def vague_openings() -> Iterator[str]:
    for path, tree in module_trees().items():
        yield from (f"{path}:{line} {text.splitlines()[0]}" for line, text in docstrings(tree) if text.startswith(OPENINGS))


def modules_without_their_name() -> Iterator[str]:
    """Yield modules with a first paragraph that has no word of the file's name (of the folder's, for a package)."""
    for path, tree in module_trees().items():
        first = (ast.get_docstring(tree) or "").partition("\n\n")[0].lower()
        name = path.parent.name if path.stem == "__init__" else path.stem
        if path.stem != "__main__" and not any(word.rstrip("s")[:6] in first for word in name.split("_") if len(word) > 1):
            yield f"{path}: {first}"


def repeated_functions() -> Iterator[str]:
    modules: dict[str, list[Path]] = {}
    for path, tree in module_trees().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                modules.setdefault(node.name, []).append(path)
    yield from (f"{name}: {len(paths)} modules" for name, paths in modules.items() if len(set(paths)) > 3)


def attribute_exists(target: str) -> bool:
    """Return True if a dotted name is a module, or an attribute behind one."""
    parts = target.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def reference_exists(role: str, path: Path, module: str) -> bool:
    """Return True if a cross-reference is a name of its module or folder, a public name, or relative to its package."""
    name = role.lstrip(".")
    dots = len(role) - len(name)
    if dots:
        package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
        return attribute_exists(".".join([*package[: len(package) - dots + 1], name]))
    if attribute_exists(name) or any(
        attribute_exists(f"{package}.{name}") for package in (module, "dtensor", "dtensor.parallel")
    ):
        return True
    return name.split(".")[-1] in names_of(path.parent)


@functools.cache
def names_of(folder: Path) -> set[str]:
    """Return the names of all functions and classes of a folder."""
    trees = [tree for path, tree in module_trees().items() if path.parent == folder]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def dangling_references() -> Iterator[str]:
    """Yield references to files, and to functions and classes by role, that do not exist."""
    files = [path for folder in ("dtensor", "tests", "docs", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    tails = {"/".join(path.parts[-n:]) for path in [*files, *ROOT.glob("*.*")] for n in range(1, 6)}
    for path in [*MODULES, *PAGES.values()]:
        text = path.read_text()
        for found in re.finditer(r"`{1,2}((?:[\w.]+/)*\w+\.(?:py|md))\b", text):
            name = found[1].removeprefix("./").removeprefix("../")
            is_example = name in ("train.py", "script.py", "hero.py", "tutorial.py", "ten_minutes.py") or name.startswith(
                ("my/", "~")
            )
            if name not in tails and not is_example:
                yield f"{path}: {name}"
        if path.suffix == ".py" and path.stem != "__main__":
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            roles = re.findall(r":(?:func|class|meth|mod|attr|data):`~?([\w.]+)`", text)
            yield from (f"{path}: {role}" for role in roles if not reference_exists(role, path, module))


def shared_file_names() -> Iterator[str]:
    """Yield file names that several folders have, but for those that are allowed."""
    stems = [path.stem for path in MODULES if path.stem != "__init__"]
    yield from sorted({stem for stem in stems if stems.count(stem) > 1} - SHARED_FILE_NAMES)


CODE_PROBLEMS = {
    "banned words in error messages": banned_in_messages,
    "docstrings that open without a verb": vague_openings,
    "modules that do not name their file": modules_without_their_name,
    "functions in more than 3 modules": repeated_functions,
    "references that lead nowhere": dangling_references,
    "file names in several folders": shared_file_names,
}


@pytest.mark.parametrize("kind", CODE_PROBLEMS)
def test_code_has_no_language_problem(kind: str) -> None:
    found = list(CODE_PROBLEMS[kind]())
    assert not found, "\n".join(found)


def test_most_function_names_have_several_words() -> None:
    functions = [node.name for tree in module_trees().values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    names = [name for name in functions if not name.startswith("__")]
    one_word = [name for name in names if "_" not in name.strip("_")]
    assert len(one_word) <= MOST_ONE_WORD * len(names)
    assert sum(map(len, names)) >= LEAST_MEAN * len(names)
