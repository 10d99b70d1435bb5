"""Carries out plan_map.py on a checkout: `python mover.py ROOT`. Moves, joins, rewrites names.

Order of work: (1) read every source module and split it into docstring, imports and body; (2) write
the joined modules; (3) rewrite dotted names and paths in every text file; (4) move tests and data
beside what they belong to. Nothing is deleted that the map does not name. What a person must look
at is printed.
"""

# ruff: noqa
import ast, re, subprocess, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from plan_map import MAP, DROPPED

ROOT = Path(sys.argv[1]).resolve()
PKG = ROOT / "src/esper"
HOME = {s: t for t, ss in MAP.items() for s in ss}
# Public names that two joined modules both define.
RENAMES = {
    ("cli.grow_view", "print_summary"): "print_grown",
    ("cli.train_view", "print_summary"): "print_trained",
    ("tamiyo.policy.travelling_layout", "SLOT_FEATURES"): "TRAVELLING_SLOT_FEATURES",
    ("tamiyo.policy.travelling_layout", "SLOT_INDEX"): "TRAVELLING_SLOT_INDEX",
}
DATA = {
    "dashboard/static": "nissa/dashboard/static",
    "dashboard/templates": "nissa/dashboard/templates",
    "report/templates": "nissa/report/templates",
    "proof/scores": "lab/proof/scores",
}
ROOMS = {
    "leyline",
    "kasmina",
    "tamiyo",
    "tasks",
    "population",
    "nissa",
    "simic",
    "envs",
    "growth",
    "integrations",
    "report",
    "dashboard",
    "runs",
    "proof",
    "bench",
    "cli",
    "scripts",
    "testing",
}


def where(module):
    base = PKG.joinpath(*module.split(".")) if module else PKG
    return (
        base / "__init__.py" if (base.is_dir() or module in PACKAGES) else base.with_suffix(".py")
    )


PACKAGES = set()


def old_path(module):
    base = PKG.joinpath(*module.split(".")) if module else PKG
    return base / "__init__.py" if (base / "__init__.py").is_file() else base.with_suffix(".py")


OLD = {}
for p in sorted(PKG.rglob("*.py")):
    parts = list(p.relative_to(PKG).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    OLD[".".join(parts)] = p
OLD_PACKAGES = {m for m, p in OLD.items() if p.name == "__init__.py"}
NEW_PACKAGES = (
    {t for t in MAP if any(o.startswith(t + ".") for o in MAP)}
    | {""}
    | {
        t
        for t in MAP
        if t in OLD_PACKAGES
        and t in OLD
        and any(HOME[s] == t and s in OLD_PACKAGES for s in MAP[t])
        and any(o.startswith(t + ".") for o in MAP)
    }
)


def new_path(module):
    base = PKG.joinpath(*module.split(".")) if module else PKG
    return base / "__init__.py" if module in NEW_PACKAGES else base.with_suffix(".py")


# ---- dotted names ----------------------------------------------------------------------------
DOTTED = re.compile(r"\besper((?:\.[a-z_][a-z0-9_]*)+)")


def rename_module(rest):
    parts = rest.split(".")
    for k in range(len(parts), 0, -1):
        head = ".".join(parts[:k])
        if head in HOME:
            tail = parts[k:]
            return ".".join([HOME[head], *tail])
        if head in DROPPED and k < len(parts):
            continue
    return rest


def dotted(text):
    def sub(m):
        rest = m.group(1)[1:]
        return "esper." + rename_module(rest) if rename_module(rest) else "esper"

    return DOTTED.sub(sub, text)


PATHS = re.compile(
    r"(?<![\w./-])((?:src/esper/)?)((?:%s)(?:/[a-z_0-9]+)*)(\.py\b|/(?=[`\s),]))"
    % "|".join(sorted(ROOMS))
)


def paths(text):
    def sub(m):
        module = m.group(2).replace("/", ".")
        if m.group(3) == ".py" and module in HOME:
            new = new_path(HOME[module]).relative_to(PKG).as_posix()
            return m.group(1) + new
        if m.group(3) == "/" and m.group(1) and module in HOME:
            return m.group(1) + HOME[module].replace(".", "/") + "/"
        return m.group(0)

    return PATHS.sub(sub, text)


# ---- splitting modules -----------------------------------------------------------------------
class Part:
    def __init__(self, module):
        self.module = module
        text = OLD[module].read_text()
        for (owner, name), new in RENAMES.items():
            if (
                owner == module
                or f"from esper.{owner} import" in text
                and re.search(
                    rf"from esper\.{re.escape(owner)} import [^\n]*\b{name}\b|from esper\.{re.escape(owner)} import \([^)]*\b{name}\b",
                    text,
                )
            ):
                text = re.sub(rf"(?<![\w.]){name}\b", new, text)
        self.text = text
        tree = ast.parse(text)
        lines = text.splitlines(keepends=True)
        drop = set()
        self.doc = ast.get_docstring(tree, clean=False)
        if self.doc is not None:
            n = tree.body[0]
            drop.update(range(n.lineno, n.end_lineno + 1))
        self.imports, self.checked = [], []
        for n in tree.body:
            if isinstance(n, (ast.Import, ast.ImportFrom)):
                self.imports.append(n)
                drop.update(range(n.lineno, n.end_lineno + 1))
            elif isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING" and not n.orelse:
                self.checked += n.body
                drop.update(range(n.lineno, n.end_lineno + 1))
        self.body = "".join(l for i, l in enumerate(lines, 1) if i not in drop).strip("\n")
        self.defined = set()
        for n in tree.body:
            if isinstance(n, (ast.FunctionDef, ast.ClassDef)):
                self.defined.add(n.name)
            elif isinstance(n, ast.Assign):
                self.defined |= {
                    y.id for x in n.targets for y in ast.walk(x) if isinstance(y, ast.Name)
                }
            elif isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name):
                self.defined.add(n.target.id)


def emit(node, target):
    """Lines of an import in its new home."""
    out = []
    if isinstance(node, ast.Import):
        for a in node.names:
            out.append(dotted(f"import {a.name}" + (f" as {a.asname}" if a.asname else "")))
        return out
    if node.module == "__future__":
        return []
    if not node.module or not (node.module == "esper" or node.module.startswith("esper.")):
        return [ast.unparse(node)]
    base = node.module.removeprefix("esper").lstrip(".")
    for a in node.names:
        full = f"{base}.{a.name}" if base else a.name
        alias = f" as {a.asname}" if a.asname else ""
        if full in OLD:  # a module itself
            new = HOME[full]
            if new == target:
                # What was `small.NAME` is NAME now.
                UNQUALIFIED.setdefault(target, set()).add(a.asname or a.name)
                continue
            head, _, leaf = new.rpartition(".")
            name = a.asname or a.name
            out.append(
                f"from esper{'.' + head if head else ''} import {leaf}"
                + (f" as {name}" if name != leaf else "")
            )
            continue
        new = HOME[base]
        name = RENAMES.get((base, a.name), a.name)
        if new == target:
            if a.asname and a.asname != a.name:
                print("LOOK: alias of a joined name", target, base, a.name, a.asname)
                LATER.setdefault(target, []).append(f"{a.asname} = {name}")
            continue
        out.append(f"from esper{'.' + new if new else ''} import {name}{alias}")
    return out


LATER = {}
UNQUALIFIED = {}


def own_modules(body, target):
    """Drop `from esper.a import b` in functions where b is joined into this module: b.c is c now."""

    def sub(m):
        base, name, alias = m.group(1).lstrip("."), m.group(2), m.group(3)
        full = f"{base}.{name}" if base else name
        if full in OLD and HOME[full] == target:
            dropped.append(alias or name)
            return ""
        return m.group(0)

    dropped = []
    body = re.sub(
        r"^[ \t]*from esper((?:\.[a-z_]+)*) import ([a-z_]+)(?: as ([a-z_]+))?\n",
        sub,
        body,
        flags=re.M,
    )
    for name in dropped:
        body = re.sub(rf"(?<![\w.\"'/]){name}\.(?=[A-Za-z_])", "", body)
    return body


def join(target, sources):
    parts = [Part(s) for s in sources]
    leaf = target.rpartition(".")[2]
    main = next(
        (p for p in parts if p.module == target or p.module.rpartition(".")[2] == leaf),
        parts[0] if parts else None,
    )
    if not parts:
        titles = {
            "utils": "Tools that are no contract: files, locks, storage, settings, processes, randomness.",
            "lab": "The laboratory: tasks, populations, proofs, environments and benchmarks of controllers.",
            "kasmina.slots": "Where a model can grow: slots found, probed, suggested and checked.",
        }
        return f'"""{titles[target]}"""\n'
    # Private names that several parts define get the part's name.
    seen = {}
    for p in parts:
        for name in sorted(p.defined):
            if name in seen and name != "__all__":
                new = f"{name}_{p.module.rpartition('.')[2].upper() if name.isupper() or name.lstrip('_').isupper() else p.module.rpartition('.')[2]}"
                if not name.startswith("_"):
                    print("LOOK: two public", name, target, seen[name], p.module)
                p.body = re.sub(rf"(?<![\w.]){re.escape(name)}\b", new, p.body)
            else:
                seen[name] = p.module
    out = [
        f'"""{main.doc}"""\n' if main.doc is not None else "",
        "\nfrom __future__ import annotations\n\n",
    ]
    lines = []
    for p in parts:
        for n in p.imports:
            lines += emit(n, target)
    lines = list(dict.fromkeys(lines))
    checked = []
    for p in parts:
        for n in p.checked:
            if isinstance(n, (ast.Import, ast.ImportFrom)):
                checked += emit(n, target)
            else:
                print("LOOK: under TYPE_CHECKING", target, ast.unparse(n)[:60])
                checked.append(ast.unparse(n))
    checked = [c for c in dict.fromkeys(checked) if c not in lines]
    if checked and "from typing import TYPE_CHECKING" not in lines:
        lines.insert(0, "from typing import TYPE_CHECKING")
    out.append("\n".join(lines) + "\n")
    if checked:
        out.append("\nif TYPE_CHECKING:\n" + "".join(f"    {c}\n" for c in checked))
    for p in parts:
        if not p.body.strip():
            continue
        if len(parts) > 1 and p is not main and p.doc:
            out.append(f"\n\n# {'-' * 4} {p.doc.strip().splitlines()[0]}\n")
        out.append("\n\n" + dotted(module_imports(own_modules(p.body, target))) + "\n")
    out += [f"\n{line}\n" for line in LATER.pop(target, [])]
    text = "".join(out)
    for name in UNQUALIFIED.pop(target, ()):
        text = re.sub(rf"(?<![\w.\"'/]){name}\.(?=[A-Za-z_])", "", text)
    # A name that comes both from a package and from its module comes from the module.
    for one in re.findall(r"^from (esper\.lab\.tasks) import (\w+)$", text, flags=re.M):
        if re.search(rf"^from {one[0]}\.\w+ import {one[1]}$", text, flags=re.M):
            text = re.sub(rf"^from {one[0]} import {one[1]}\n", "", text, flags=re.M)
    text = merge_tables(text)
    if not any(p.imports for p in parts) and "annotations" not in "".join(p.text for p in parts):
        text = text.replace("\nfrom __future__ import annotations\n\n", "")
    return text


def merge_tables(text):
    """Join entries of a table of lazy names that now have the same module."""
    entry = re.compile(r'^    "(esper[\w.]*)": \((.*?)\),\n', flags=re.M | re.S)
    found = entry.findall(text)
    keys = [k for k, _ in found]
    for key in {k for k in keys if keys.count(k) > 1}:
        names = [n for k, v in found if k == key for n in re.findall(r'"(\w+)"', v)]
        joined = f'    "{key}": (' + ", ".join(f'"{n}"' for n in names) + ",),\n"
        first = True

        def sub(m):
            nonlocal first
            if m.group(1) != key:
                return m.group(0)
            if first:
                first = False
                return joined
            return ""

        text = entry.sub(sub, text)
    return text


def contracts():
    """Import contracts of the new rooms, as floors."""
    path = ROOT / "pyproject.toml"
    text = path.read_text()
    head, _, rest = text.partition("[[tool.importlinter.contracts]]")
    text = head
    rooms = [
        "leyline",
        "utils",
        "kasmina",
        "tamiyo",
        "nissa",
        "growth",
        "integrations",
        "simic",
        "lab",
        "scripts",
        "testing",
    ]
    may = {
        "leyline": [],
        "utils": ["leyline"],
        "kasmina": ["leyline", "utils"],
        "tamiyo": ["leyline", "utils"],
        "nissa": ["leyline", "utils"],
        "growth": ["leyline", "utils", "kasmina", "tamiyo", "nissa"],
        "integrations": ["leyline", "utils", "kasmina", "tamiyo", "nissa", "growth"],
    }
    for room, allowed in may.items():
        forbidden = [r for r in rooms if r != room and r not in allowed]
        text += (
            f'[[tool.importlinter.contracts]]\nname = "{room} imports {", ".join(allowed) or "nothing of esper"}"\ntype = "forbidden"\nsource_modules = ["esper.{room}"]\nforbidden_modules = [\n'
            + "".join(f'    "esper.{r}",\n' for r in forbidden)
            + "]\n\n"
        )
    text += """[[tool.importlinter.contracts]]
name = "the laboratory: tasks, populations, training, then what judges and measures"
type = "layers"
layers = [
    "esper.scripts",
    "esper.testing",
    "esper.lab.bench",
    "esper.lab.proof : esper.lab.envs : esper.lab.imagined",
    "esper.simic",
    "esper.lab.population",
    "esper.lab.tasks",
]
"""
    text = text.replace(
        '"src/esper/population/kernels/**"', '"src/esper/lab/population/kernels/**"'
    )
    for a, b in DATA.items():
        text = text.replace(f'"{a}/', f'"{b}/')
    path.write_text(text)


def main():
    written = {t: join(t, ss) for t, ss in MAP.items()}
    moves = [(PKG / a, PKG / b) for a, b in DATA.items()]
    held = {}
    for a, b in moves:
        for f in a.rglob("*"):
            if f.is_file():
                held[b / f.relative_to(a)] = f.read_bytes()
                f.unlink()
    keep = {p for p in PKG.rglob("*") if p.is_file() and p.suffix != ".py"}
    for p in OLD.values():
        p.unlink()
    for t, text in written.items():
        path = new_path(t)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(paths(text))
    for p, data in held.items():
        p.parent.mkdir(parents=True, exist_ok=True)
        p.write_bytes(data)
    for d in sorted((d for d in PKG.rglob("*") if d.is_dir()), key=lambda d: -len(d.parts)):
        if d.name == "__pycache__" or not any(d.iterdir()):
            subprocess.run(["rm", "-rf", str(d)])
    move_tests()
    rewrite_others()
    contracts()


TEST_HOMES = {}


def test_home(path):
    """New place of a file of tests/ that mirrors a module or a package."""
    rel = path.relative_to(ROOT / "tests")
    folders = rel.parts[:-1]
    if not folders or folders[0] not in ROOMS:
        return path
    package = ".".join(folders)
    stem = path.stem
    if stem.startswith("test_"):
        rest = stem.removeprefix("test_")
        if rest == "init":
            target = HOME.get(package)
            if target is None:
                return path
            if target in NEW_PACKAGES:
                return (ROOT / "tests").joinpath(*target.split("."), "test_init.py")
            head, _, leaf = target.rpartition(".")
            return (ROOT / "tests").joinpath(*head.split("."), f"test_{leaf}_{folders[-1]}.py")
        pieces = rest.split("_")
        for k in range(len(pieces), 0, -1):
            for name in ("_".join(pieces[:k]), "_" + "_".join(pieces[:k])):
                module = f"{package}.{name}"
                if module in HOME:
                    target = HOME[module]
                    extra = pieces[k:]
                    head, _, leaf = target.rpartition(".")
                    if target in NEW_PACKAGES:
                        head, leaf = target, "init"
                        middle = [name.strip("_")] if module != target else []
                    else:
                        middle = [] if leaf == name.strip("_") else [name.strip("_")]
                    if middle and middle[0].startswith(leaf + "_"):
                        middle = [middle[0].removeprefix(leaf + "_")]
                    return (ROOT / "tests").joinpath(
                        *head.split("."), f"test_{'_'.join([leaf, *middle, *extra])}.py"
                    )
        print("LOOK: test mirrors nothing", rel)
    target = HOME.get(package) or {"runs": "nissa"}.get(package, package)
    if target not in NEW_PACKAGES:
        target = target.rpartition(".")[0]
    return (ROOT / "tests").joinpath(*target.split("."), path.name)


def move_tests():
    files = [p for p in (ROOT / "tests").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    taken = {}
    for p in files:
        new = test_home(p)
        if new in taken:
            print("LOOK: two tests become", new.relative_to(ROOT), taken[new].name, p)
            new = new.with_name(new.stem + "_2.py")
        taken[new] = p
        TEST_HOMES[p] = new
    held = {new: p.read_bytes() for p, new in TEST_HOMES.items()}
    for p in files:
        p.unlink()
    for new, data in held.items():
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(data)
    for d in sorted(
        (d for d in (ROOT / "tests").rglob("*") if d.is_dir()), key=lambda d: -len(d.parts)
    ):
        if d.name == "__pycache__" or not any(d.iterdir()):
            subprocess.run(["rm", "-rf", str(d)])


def rewrite_others():
    names = {}
    for p, new in TEST_HOMES.items():
        if p != new and p.suffix == ".py":
            a = ".".join(p.relative_to(ROOT).with_suffix("").parts)
            b = ".".join(new.relative_to(ROOT).with_suffix("").parts)
            names[a] = b
            names[p.relative_to(ROOT).as_posix()] = new.relative_to(ROOT).as_posix()
    # tests/trains.py names files from tests/ on.
    own = ROOT / "tests/trains.py"
    text = own.read_text()
    short = {
        p.relative_to(ROOT / "tests").as_posix(): n.relative_to(ROOT / "tests").as_posix()
        for p, n in TEST_HOMES.items()
        if p != n
    }
    own.write_text(
        re.sub(r'(?<=")[\w/]+\.py(?=")', lambda m: short.get(m.group(0), m.group(0)), text)
    )
    pattern = re.compile(
        "|".join(
            rf"(?<![\w./]){re.escape(n)}(?![\w/])" for n in sorted(names, key=len, reverse=True)
        )
    )
    for p in subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"],
        capture_output=True,
        text=True,
    ).stdout.split():
        p = ROOT / p
        if (
            not p.is_file()
            or p.suffix not in {".py", ".md", ".toml", ".yml", ".yaml", ".html", ".txt", ".cfg", ""}
            and p.name != "Makefile"
        ):
            continue
        if p.is_relative_to(PKG):
            continue
        try:
            text = p.read_text()
        except UnicodeDecodeError:
            continue
        new = text
        if p.suffix == ".py":
            for (owner, name), to in RENAMES.items():
                if f"from esper.{owner} import" in new and re.search(
                    rf"from esper\.{re.escape(owner)} import [^\n(]*\b{name}\b|from esper\.{re.escape(owner)} import \([^)]*\b{name}\b",
                    new,
                ):
                    new = re.sub(rf"(?<![\w.]){name}\b", to, new)
            new = module_imports(new)
        new = paths(dotted(pattern.sub(lambda m: names[m.group(0)], new)))
        if new != text:
            p.write_text(new)


def module_imports(text):
    """Rewrite `from esper.a import b` where b is a module that has another home."""

    def sub(m):
        base, rest = m.group(1).lstrip("."), m.group(2)
        out = []
        for item in rest.split(","):
            name, _, alias = item.strip().partition(" as ")
            full = f"{base}.{name}" if base else name
            if full in OLD and HOME.get(full) != full:
                head, _, leaf = HOME[full].rpartition(".")
                as_ = alias or name
                out.append(
                    f"from esper{'.' + head if head else ''} import {leaf}"
                    + (f" as {as_}" if as_ != leaf else "")
                )
            else:
                return m.group(0)
        return "\n".join(
            f"{m.group(0)[: len(m.group(0)) - len(m.group(0).lstrip())]}{o}" for o in out
        )

    return re.sub(
        r"^[ \t]*from esper((?:\.[a-z_]+)*) import ([a-z_, ]+(?: as [a-z_]+)?)$",
        sub,
        text,
        flags=re.M,
    )


main()
