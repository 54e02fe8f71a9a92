#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks prose against the project's style: documentation, docstrings, comments, help and messages.

python scripts/plain_words.py             # checks everything; exit code 1 if there are findings
python scripts/plain_words.py PATH…       # checks files and folders
python scripts/plain_words.py --count     # counts the findings by word

The style: no word of the list below, no word twice in a row, no sentence of more than 45 words; a docstring does not
begin with a clause such as "Whether …" and says more than the name that it describes. Documents are also checked by
proselint.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "specvla_ros", "kernels", "launch", "config", "msg")
PLACES += ("action", "benchmarks", "scripts")
SUFFIXES = (".md", ".py", ".msg", ".action", ".yaml")
# A pattern, without regard to case, and the better words.
WORDS = {
    r"pictures?": "image, frame; plot or figure in a document",
    r"taught": "trained, distilled",
    r"told": "reported, logged, given",
    r"anew": "again, from scratch",
    r"begun": "started, admitted",
    r"(whoever|somebody|nobody|everybody)": "the component's or the user's name",
    r"(go|goes|went|going) on": "resume, continue",
    r"(from (0|1|zero|one) on)": "at least, non-negative",
    r"(must be|is|be|as) a text": "a string",
    r"(?<!there )(is|are) no (?!longer|more|less|better|worse|way|such|other)\w+": "is not a …",
    r"(to be had|cannot be had|can be had)": "available",
    r"is to be (known|reached|done|seen|found|had)": "say who does it, or what it is",
    r"in (its|their) own time": "within the time limit",
    r"(won|win|wins) back": "recover the cost of",
    r"as it comes": "eagerly",
    r"signs? of life": "heartbeat",
    r"hand on the switch": "dead-man's switch",
    r"cut short": "interrupted",
    r"one's own": "your own",
    r"for who\b": "for code that",
    r"stands? for no": "does not decode to",
    r"comes? to nothing": "fails, has no effect",
    r"as much as nothing": "almost nothing",
    r"lets? go of": "releases, drops",
    r"gives? way": "yields",
}
_BANNED = re.compile("|".join(rf"(?P<w{i}>\b{pattern}\b)" for i, pattern in enumerate(WORDS)), re.IGNORECASE)
_FRAGMENT = re.compile(
    r"(What|Whether|Of|Those|That|Which|Where|Who|How|Why|As|To be|Same as|In which|By which|From which)\b(?!.*\?)"
)
_LITERAL = re.compile(r"``[^`]+``|`[^`]+`|\"[^\"]*\.\w+\"|\]\([^)]*\)|https?://\S+")
_TWICE = re.compile(r"\b([A-Za-z]+)(?: +|\n *)\1\b(?!-)")
_MAX_WORDS = 45  # in a sentence
_MAX_WORDS_BETWEEN_COMMAS = 8  # a sentence with fewer is an enumeration, and may be longer
# Ends of sentences, and of blocks of Markdown: paragraphs, list items, headings, rows of tables; and command lines.
_SENTENCE_END = re.compile(r"(?<=[.:;?!])\s|\n *\n|\n *(?:[-*#|]|\d+\.) ?|\||\n *(?=python )")
# Words of a docstring that say nothing about what is described.
_EMPTY_WORDS = {"a", "an", "and", "at", "by", "for", "from", "in", "its", "of", "on", "one", "or", "the", "to", "with"}
# Checks of proselint that do not fit technical English in Markdown: curly quotes, × in code, "résumé" for the verb,
# "the 5090s" for a device's possessive, and words repeated in a heading and the sentence below it.
_NO_PROSELINT = ("typography", "dates_times", "lexical_illusions")


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, what was found, and what to write instead."""
    for line, text, kind, name in _prose(path):
        plain = _LITERAL.sub(lambda match: " " * len(match[0]), text)
        for match in _BANNED.finditer(plain):
            better = list(WORDS.values())[int((match.lastgroup or "w0")[1:])]
            yield line + plain.count("\n", 0, match.start()), match[0], better
        if kind == "docstring" and (match := _FRAGMENT.match(plain)):
            yield line, f"a docstring that begins with {match[0]}", "a noun, or a verb in the third person"
        if kind in ("document", "docstring"):
            yield from _long_sentences(line, text)
        for match in _TWICE.finditer(_LITERAL.sub(lambda match: "." * len(match[0]), text)):
            yield line + text.count("\n", 0, match.start()), match[0], "it once"
        if name and _repeats(name, text):
            yield line, f"a docstring that repeats '{name}'", "the unit, the shape or the condition, or no docstring"


def _long_sentences(line: int, text: str) -> Iterator[tuple[int, str, str]]:
    text, start = re.sub(r"`[^`]+`", lambda match: "x" + "\n" * match[0].count("\n"), text), 0
    text = re.sub(r"\]\([^)]*\)", lambda match: "]" + "\n" * match[0].count("\n"), text)
    for end in (*_SENTENCE_END.finditer(text), None):
        sentence = text[start : end.start() if end else None]
        count = len(re.findall(r"[A-Za-z][\w'-]*", sentence))
        if count > _MAX_WORDS and count / (1 + sentence.count(",")) >= _MAX_WORDS_BETWEEN_COMMAS:
            yield line + text.count("\n", 0, start), f"a sentence of {count} words", "two sentences, or a list"
        start = end.end() if end else start


def _repeats(name: str, docstring: str) -> bool:
    """True if all words of a docstring are in the name that it describes."""
    words = {*re.findall(r"[a-z]+", docstring.lower())} - _EMPTY_WORDS
    named = {each.lower() for each in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return bool(words) and {*map(_stem, words)} <= {*map(_stem, named)}


def _stem(word: str) -> str:
    return re.sub(r"(?<=\w{3})(ing|ies|es|ed|s|e|y)$", "", word)


def proselint_findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Findings of proselint in a Markdown document outside its code, in the form of `findings`."""
    from proselint.checks import __register__
    from proselint.config import DEFAULT
    from proselint.registry import CheckRegistry
    from proselint.tools import LintFile

    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(__register__)
    checks = DEFAULT["checks"] | dict.fromkeys(_NO_PROSELINT, False)
    for line, text, *_ in _prose(path):
        plain = _LITERAL.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
        for found in LintFile(path.name, plain).lint({**DEFAULT, "checks": checks}) if plain.strip() else ():
            result = found.check_result
            word = plain[result.span[0] - 1 : result.span[1] - 1].strip()
            yield line + found.pos[0] - 1, word, f"otherwise: {result.message} ({result.check_path})"


def _prose(path: Path) -> Iterator[tuple[int, str, str, str]]:
    """The first line, the text and the kind of each piece of prose in a file; the name that a docstring describes."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        # Code between fences, with its lines kept.
        yield 1, re.sub(r"(?ms)^ *```.*?^ *```", lambda code: "\n" * code[0].count("\n"), text), "document", ""
    elif path.suffix in (".msg", ".action", ".yaml"):
        for number, line in enumerate(text.splitlines(), 1):
            yield number, line.partition("#")[2], "comment", ""
    else:
        yield from _prose_of_python(text)


def _prose_of_python(text: str) -> Iterator[tuple[int, str, str, str]]:
    docstrings = {}
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings[first.value] = getattr(node, "name", "")
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node in docstrings:
                yield node.lineno, node.value, "docstring", docstrings[node]
            elif node.value.count(" ") > 1:
                yield node.lineno, node.value, "string", ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, "comment", ""


def files(places: list[Path]) -> Iterator[Path]:
    """The files with prose in some places; the word list itself is not one."""
    for place in places:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.suffix in SUFFIXES and path.resolve() != Path(__file__).resolve():
                yield path


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="only count the findings by word")
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; default: all of the project's")
    options = parser.parse_args()
    counted: Counter[str] = Counter()
    for path in files(options.paths or [ROOT / place for place in PLACES]):
        further = proselint_findings(path) if path.suffix == ".md" else ()
        for line, found, better in (*findings(path), *further):
            counted[found.lower()] += 1
            if not options.count:
                print(f"{path}:{line}: '{found}': write {better}")
    for found, count in counted.most_common() if options.count else ():
        print(f"{count:5} {found}")
    return int(bool(counted))


if __name__ == "__main__":
    sys.exit(main())
