# SPDX-License-Identifier: Apache-2.0
"""Walks through the product's code like a reader: from a function into every function that it calls, in order.

Calls are resolved statically: imports, methods of `self`, and objects whose class is known from an annotation, a
constructor or a return type. Run-time choices (a registry's entry, a protocol's method, a callback) are not followed; a
walk across such a place has several starts. Each function is read once, at its first call.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """A function or class of a module.

    Args:
        module: its dotted name.
        name: `function`, `Class` or `Class.method`.
    """

    module: str
    name: str


@dataclass
class Walk:
    """The result of a walk.

    Attributes:
        files: modules in the order of their first entry.
        climbs: calls into a module above the caller's, `caller -> function`.
        callbacks: calls back into a module whose function is waiting for the caller, `caller -> function`.
        returns: pairs of modules, `caller -> callee`, of calls into a module that was entered and left before.
    """

    files: list[str] = field(default_factory=list)
    climbs: list[str] = field(default_factory=list)
    callbacks: list[str] = field(default_factory=list)
    returns: list[str] = field(default_factory=list)


class Code:
    """The functions, classes and names of all modules.

    Args:
        trees: syntax by dotted module name.
        imports: the modules that each one imports.
    """

    def __init__(self, trees: Mapping[str, ast.Module], imports: Mapping[str, set[str]]) -> None:
        self.functions: dict[Place, FunctionNode] = {}
        self.classes: dict[Place, ast.ClassDef] = {}
        self.names: dict[str, dict[str, Place]] = {}
        self._fields: dict[Place, dict[str, Place]] = {}
        for module, tree in trees.items():
            self._index(module, tree, trees)
        self.floors = _floors(imports)

    def _index(self, module: str, tree: ast.Module, trees: Mapping[str, ast.Module]) -> None:
        names = self.names.setdefault(module, {})
        for node in ast.walk(tree):  # also imports inside functions
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    place = Place(whole, "") if whole in trees else Place(node.module, alias.name)
                    names[alias.asname or alias.name] = place
        for node in tree.body:
            if isinstance(node, FunctionNode):
                names[node.name] = Place(module, node.name)
                self.functions[Place(module, node.name)] = node
            elif isinstance(node, ast.ClassDef):
                names[node.name] = Place(module, node.name)
                self.classes[Place(module, node.name)] = node
                for member in node.body:
                    if isinstance(member, FunctionNode):
                        self.functions[Place(module, f"{node.name}.{member.name}")] = member

    def method(self, of: Place, name: str) -> Place | None:
        """Returns a method of a class or of its base classes in the product."""
        found = Place(of.module, f"{of.name}.{name}")
        if found in self.functions:
            return found
        for base in self.classes[of].bases if of in self.classes else ():
            parent = self.annotated(of.module, base)
            inherited = self.method(parent, name) if parent and parent != of else None
            if inherited:
                return inherited
        return None

    def annotated(self, module: str, annotation: ast.expr | None) -> Place | None:
        """Returns the product's class that an annotation names; for `X | None` it is X."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(annotation, ast.BinOp):
            return self.annotated(module, annotation.left) or self.annotated(module, annotation.right)
        if isinstance(annotation, ast.Name):
            place = self.names[module].get(annotation.id)
            return place if place in self.classes else None
        return None

    def fields(self, of: Place) -> Mapping[str, Place]:
        """Returns the classes of an object's attributes, where the source gives them."""
        if of not in self._fields:
            self._fields[of] = {}  # a class may refer to itself
            self._fields[of] = dict(self._find_fields(of))
        return self._fields[of]

    def _find_fields(self, of: Place) -> Iterator[tuple[str, Place]]:
        for member in self.classes[of].body:
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                found = self.annotated(of.module, member.annotation)
                if found:
                    yield member.target.id, found
            if isinstance(member, FunctionNode):
                known = self.parameters(Place(of.module, f"{of.name}.{member.name}"))
                for node in _in_order(member):
                    if isinstance(node, ast.Assign | ast.AnnAssign):
                        yield from self.learn(of.module, node, known)

    def learn(
        self, module: str, node: ast.Assign | ast.AnnAssign, known: dict[str, Place]
    ) -> Iterator[tuple[str, Place]]:
        """Adds the classes of assigned variables to `known` and yields those of attributes."""
        annotated = self.annotated(module, node.annotation) if isinstance(node, ast.AnnAssign) else None
        pairs = [(target, node.value) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]
        for target, value in pairs:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs += zip(target.elts, value.elts, strict=False)
                continue
            found = annotated or (self.type_of(module, value, known) if value else None)
            if found and isinstance(target, ast.Name):
                known[target.id] = found
            elif found and isinstance(target, ast.Attribute):
                yield target.attr, found

    def parameters(self, function: Place) -> dict[str, Place]:
        """Returns the classes of a function's parameters from their annotations, including `self`."""
        node = self.functions[function]
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        found = {each.arg: self.annotated(function.module, each.annotation) for each in arguments}
        holder, _, method = function.name.rpartition(".")
        if method and holder and arguments:
            found[arguments[0].arg] = Place(function.module, holder)
        return {name: place for name, place in found.items() if place}

    def type_of(self, module: str, node: ast.expr, known: Mapping[str, Place]) -> Place | None:
        """Returns the class of an expression's value, where the source gives it."""
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Await):
            return self.type_of(module, node.value, known)
        if isinstance(node, ast.Attribute):
            holder = self.type_of(module, node.value, known)
            if holder is None or holder not in self.classes:
                return None
            found = self.fields(holder).get(node.attr)
            getter = self.method(holder, node.attr)
            return found or (self.annotated(getter.module, self.functions[getter].returns) if getter else None)
        if isinstance(node, ast.Call):
            called = self.called(module, node.func, known)
            if called in self.classes:
                return called
            if called in self.functions and called is not None:
                return self.annotated(called.module, self.functions[called].returns)
        return None

    def called(self, module: str, function: ast.expr, known: Mapping[str, Place]) -> Place | None:
        """Returns the product's function, method or class that a call names."""
        if isinstance(function, ast.Name):
            return self.names[module].get(function.id)
        if not isinstance(function, ast.Attribute):
            return None
        if isinstance(function.value, ast.Name):
            place = self.names[module].get(function.value.id)
            if place and place.name == "":  # a module
                return self.names[place.module].get(function.attr)
            if place in self.classes and place is not None:
                return self.method(place, function.attr)
        holder = self.type_of(module, function.value, known)
        return self.method(holder, function.attr) if holder else None

    def walk(self, *starts: Place) -> Walk:
        """Walks from each start in turn; the step between starts, a message or a callback, is not counted.

        Raises:
            KeyError: A start is not a function of the product.
        """
        found, read = Walk(), set[Place]()
        for start in starts:
            self._enter(start, (), found, read)
        return found

    def _enter(self, place: Place, callers: tuple[str, ...], found: Walk, read: set[Place]) -> None:
        if place in read:
            return
        read.add(place)
        node = self.functions[place]
        module = place.module
        if callers and module != callers[-1]:
            caller = callers[-1]
            if self.floors[module] > self.floors[caller]:
                found.climbs.append(f"{caller} -> {module}.{place.name}")
            if module in callers:
                found.callbacks.append(f"{caller} -> {module}.{place.name}")
            if module in found.files and (back := f"{caller} -> {module}") not in found.returns:
                found.returns.append(back)
        if module not in found.files:
            found.files.append(module)
        known = self.parameters(place)
        for call in _in_order(node):
            if isinstance(call, ast.Call):
                self._follow((*callers, module), call, known, found, read)
            elif isinstance(call, ast.Assign | ast.AnnAssign):
                for _ in self.learn(place.module, call, known):
                    pass

    def _follow(
        self, callers: tuple[str, ...], call: ast.Call, known: Mapping[str, Place], found: Walk, read: set[Place]
    ) -> None:
        called = self.called(callers[-1], call.func, known)
        if called in self.classes and called is not None:
            called = self.method(called, "__init__") or self.method(called, "__post_init__")
        if called in self.functions and called is not None:
            self._enter(called, callers, found, read)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """A function's calls and assignments in execution order: nested ones come first."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, FunctionNode | ast.ClassDef):
            yield from _in_order(child)
    if isinstance(node, ast.Call | ast.Assign | ast.AnnAssign):
        yield node


def _floors(imports: Mapping[str, set[str]]) -> dict[str, int]:
    """The floor of each module: above all its imports; modules of a cycle are not above each other."""
    floors: dict[str, int] = {}

    def floor(module: str, above: frozenset[str]) -> int:
        if module not in floors:
            below = imports[module] - above
            floors[module] = 1 + max((floor(each, above | {module}) for each in below), default=0)
        return floors[module]

    for module in imports:
        floor(module, frozenset())
    return floors
