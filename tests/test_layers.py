"""The order of the layers, and the few rules that hold the whole tree together, read from the source without importing it.

Each rule is a function from a source tree to a list of complaints. It is applied to this repository, which must have none,
and to small trees that break it, where it must say so: a checker that finds nothing is worth nothing.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A module imports from its own layer and from earlier ones.
LAYERS = (
    ("errors", "config"),
    ("topology",),
    ("kernels",),
    ("transport",),
    ("cost_cache", "comm", "work", "domains"),
    ("algorithms",),
    ("plan",),
    ("ops", "reductions", "rms_norm", "moe_ops", "moe", "gradients"),
    ("clocks", "measure", "primitives", "calibrate", "calibrate_cuda", "simulate"),
    ("integrations",),
    ("cli", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
USERS = {"integrations", "cli", "__main__"}  # they use a2a as anybody does, by `import a2a`
FOR_ALGORITHMS = "a2a.transport.base"  # all that an algorithm may know of a transport
# `import a2a` loads them: they are part of it.
BUILT_IN = {f"a2a.integrations.{name}" for name in ("c10d_backend", "c10d_reductions", "patch")}
# XLA calls the C library itself: they may load it, ask for its time limit, and prepare its launches.
OWN_HANDLERS = {"a2a.integrations.jax", "a2a.integrations.jax_cuda"}
ASKED_WHEN_CALLED = {("a2a.comm", "a2a.plan")}  # Communicator.plan(): the planner stands on communicators
WITHOUT_TORCH = {"errors", "config", "topology"}
MOST_PUBLIC_NAMES = 30
MOST_VARIABLES = 8
TOP_LEVEL = {"pyproject.toml", "README.md", "a2a", "csrc", "bench", "tests", "examples"}

Complaints = list[str]


def python_files(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every file of the package, as (path within the root, syntax tree)."""
    for path in sorted((root / "a2a").rglob("*.py")):
        yield path.relative_to(root).as_posix(), ast.parse(path.read_text(), str(path))


def c_files(root: Path) -> Iterator[tuple[str, str]]:
    """Every file of the C++ and CUDA sources, as (path within the root, text without comments)."""
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
            yield (
                path.relative_to(root).as_posix(),
                re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL),
            )


def module_of(file: str) -> str:
    """a2a/topology/__init__.py is a2a.topology."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def layer_of(module: str) -> str:
    """The part of a dotted name that LAYERS knows; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def imports(root: Path, file: str, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Every import of a part of a2a as (line, module, imported name or ""), those in functions too."""
    package = file.removesuffix(".py").removesuffix("/__init__").split("/")
    package = package if file.endswith("__init__.py") else package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "a2a":
                    yield node.lineno, alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, node.module] if node.module else base)
            if source.split(".")[0] != "a2a":
                continue
            for alias in node.names:
                inner = root.joinpath(*source.split("."), alias.name)
                if inner.with_suffix(".py").is_file() or (inner / "__init__.py").is_file():
                    yield node.lineno, f"{source}.{alias.name}", ""
                else:
                    yield node.lineno, source, alias.name


def at_the_top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs when a module is imported: not the bodies of functions, nor what only type checkers read."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from at_the_top(node.orelse)
            continue
        yield node
        for inner in ("body", "orelse", "finalbody"):
            yield from at_the_top(getattr(node, inner, []))
        for handler in getattr(node, "handlers", []):
            yield from at_the_top(handler.body)


def public_names(root: Path) -> list[str]:
    """`__all__` of the package, read from its source."""
    for node in ast.parse((root / "a2a" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                return list(ast.literal_eval(node.value))
    return []


def order_of_layers(root: Path) -> Complaints:
    """Imports go from later layers to earlier ones."""
    found = []
    for file, tree in python_files(root):
        here = layer_of(module_of(file))
        if here and here not in LEVEL:
            found.append(f"{file}: belongs to no layer; name it in LAYERS of tests/test_layers.py or move it")
            continue
        at_once = {node.lineno for node in at_the_top(tree.body)}
        for line, module, name in imports(root, file, tree):
            if (module_of(file), module) in ASKED_WHEN_CALLED and line not in at_once:
                continue
            there = layer_of(module)
            what = f"{file}:{line}: imports {module}" + (f" ({name})" if name else "")
            if not there:
                if here and here not in USERS:
                    found.append(f"{what}; only {', '.join(sorted(USERS))} import the package itself")
            elif there not in LEVEL:
                found.append(f"{what}, which belongs to no layer")
            elif there in {"integrations", "cli"} and here != there and here != "__main__":
                if here or module not in BUILT_IN:
                    found.append(f"{what}; nothing imports {there}")
            elif here and LEVEL[there] > LEVEL[here]:
                found.append(f"{what}; {there} comes after {here}")
    return found


def algorithms_know_no_transport(root: Path) -> Complaints:
    """An algorithm runs on every transport, so it sees the base class alone."""
    return [
        f"{file}:{line}: imports {module}; algorithms import {FOR_ALGORITHMS} only"
        for file, tree in python_files(root)
        if layer_of(module_of(file)) == "algorithms"
        for line, module, _ in imports(root, file, tree)
        if layer_of(module) == "transport" and module != FOR_ALGORITHMS
    ]


def integrations_use_public_names(root: Path) -> Complaints:
    """What a trainer's integration needs, anybody's needs: it is in `a2a.__all__`."""
    public = set(public_names(root))
    return [
        f"{file}:{line}: imports {name or module} of {module}, which is not in a2a.__all__"
        for file, tree in python_files(root)
        if layer_of(module_of(file)) == "integrations" and module_of(file) not in BUILT_IN
        for line, module, name in imports(root, file, tree)
        if not (module_of(file) in OWN_HANDLERS and layer_of(module) in {"kernels", "config", "algorithms"})
        if layer_of(module) != "integrations" and not (module == "a2a" and not name) and name not in public
    ]


def topology_works_without_torch(root: Path) -> Complaints:
    """A topology is a value: no import of torch runs before a function of it is called."""

    found = []
    for file, tree in python_files(root):
        if layer_of(module_of(file)) in WITHOUT_TORCH:
            for node in at_the_top(tree.body):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                if any(name.split(".")[0] == "torch" for name in names):
                    found.append(f"{file}:{node.lineno}: imports torch at the top of the module")
    return found


def environment_is_read_in_config(root: Path) -> Complaints:
    """Only a2a/config.py touches the environment, and no C++ does."""
    touching = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for file, tree in python_files(root):
        if file == "a2a/config.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                used = {node.attr} & touching
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                used = {alias.name for alias in node.names} & touching
            else:
                continue
            found += [f"{file}:{node.lineno}: uses os.{name}; ask a2a.config" for name in sorted(used)]
    for file, text in c_files(root):
        found += [f"{file}: calls {name}; pass the value in" for name in re.findall(r"\b(?:secure_)?getenv\b", text)]
    return found


def few_variables(root: Path) -> Complaints:
    """At most eight A2A_* variables; the others named anywhere are typing errors or undocumented."""
    named = {
        file: {
            variable
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            for variable in re.findall(r"\bA2A_[A-Z0-9]+(?:_[A-Z0-9]+)*\b", node.value)
        }
        for file, tree in python_files(root)
    }
    known = named.get("a2a/config.py", set())
    found = [
        f"{file}: names {variable}, which a2a/config.py doesn't know"
        for file, variables in named.items()
        for variable in sorted(variables - known)
    ]
    if len(known) > MOST_VARIABLES:
        found.append(f"a2a/config.py: {len(known)} variables, at most {MOST_VARIABLES}: {', '.join(sorted(known))}")
    return found


def few_public_names(root: Path) -> Complaints:
    """At most thirty public names."""
    names = public_names(root)
    if len(names) != len(set(names)):
        return ["a2a/__init__.py: __all__ lists a name twice"]
    return (
        [] if 0 < len(names) <= MOST_PUBLIC_NAMES else [f"a2a/__init__.py: __all__ has {len(names)} names, not 1 to 30"]
    )


def assembly_lives_in_ptx(root: Path) -> Complaints:
    """Inline assembly is in ptx.cuh, with a memory clobber unless it converts; compat.h may name glibc's symbol versions."""
    found = []
    for file, text in c_files(root):
        name = file.rsplit("/", 1)[-1]
        end = ";" if name == "ptx.cuh" else "(?:;|$)"
        for match in re.finditer(rf"\b(?:asm|__asm|__asm__)\b(.*?\)\s*{end})", text, flags=re.DOTALL | re.MULTILINE):
            if name == "ptx.cuh":
                if '"memory"' not in match[1] and not re.match(r'\(\s*"cvt\.', match[1]):
                    found.append(f"{file}: assembly without a memory clobber: {match[0].strip()[:60]}")
            elif not (name == "compat.h" and match[1].startswith('(".symver ')):
                found.append(f"{file}: inline assembly outside ptx.cuh: {match[0].strip()[:60]}")
    return found


def no_stray_names(tracked: list[str]) -> Complaints:
    """The repository's top level holds what it is known for, and dot-files."""
    names = sorted({name.split("/")[0] for name in tracked})
    return [
        f"{name}: not a top-level name of this repository" for name in names if name[0] != "." and name not in TOP_LEVEL
    ]


RULES: list[Callable[[Path], Complaints]] = [
    order_of_layers,
    algorithms_know_no_transport,
    integrations_use_public_names,
    topology_works_without_torch,
    environment_is_read_in_config,
    few_variables,
    few_public_names,
    assembly_lives_in_ptx,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Callable[[Path], Complaints]) -> None:
    assert rule(ROOT) == []


def test_the_repository_has_no_stray_names() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert no_stray_names(listed.stdout.splitlines()) == []


GOOD_TREE = {
    "a2a/__init__.py": "from a2a.integrations import c10d_backend\nfrom a2a.ops import f\n__all__ = ['f']\n",
    "a2a/__main__.py": "from a2a.cli import main\n",
    "a2a/errors.py": "",
    "a2a/config.py": "import os\nTIMEOUT = os.environ.get('A2A_TIMEOUT_S')\n",
    "a2a/topology/__init__.py": "from a2a.topology.model import Topology\n",
    "a2a/topology/model.py": (
        "from typing import TYPE_CHECKING\nfrom .. import errors\nif TYPE_CHECKING:\n    import torch\n"
        "def detect():\n    import torch\n"
    ),
    "a2a/kernels/__init__.py": "",
    "a2a/transport/__init__.py": "",
    "a2a/transport/base.py": "from a2a.kernels import cpu\nfrom ..errors import A2AError\n",
    "a2a/transport/cpu_shm.py": "from .base import Transport\n",
    "a2a/comm.py": (
        "from a2a.work import Work\nfrom a2a.transport.cpu_shm import CpuShm\n"
        "def plan():\n    from a2a.plan import choose\n"
    ),
    "a2a/work.py": "import a2a.config\n# os.environ\n",
    "a2a/algorithms/__init__.py": "",
    "a2a/algorithms/one_shot.py": "from a2a.transport import base\nfrom a2a.algorithms.base import Algorithm\n",
    "a2a/plan.py": "'''The limit is A2A_TIMEOUT_S; -DA2A_ISA is a macro, A2A_* a family.'''\n",
    "a2a/ops.py": "from .plan import Plan\nf = 1\n",
    "a2a/integrations/__init__.py": "",
    "a2a/integrations/c10d_backend.py": "import a2a\nfrom a2a import f\nfrom a2a.ops import f\nimport torch\n",
    "a2a/cli/__init__.py": "import a2a\nfrom a2a.plan import Plan\nfrom . import bench\n",
    "a2a/cli/bench.py": "",
    "csrc/cpu/compat.h": '#define V(n) __asm__(".symver " #n)\n',
    "csrc/cpu/signal.h": "// no asm, no getenv here\nint assembly();\n",
    "csrc/cuda/ptx.cuh": 'asm volatile("fence;" ::: "memory");\n',
}


def plant(root: Path, changes: dict[str, str]) -> Path:
    for file, text in (GOOD_TREE | changes).items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_tree_passes(rule: Callable[[Path], Complaints], tmp_path: Path) -> None:
    assert rule(plant(tmp_path, {})) == []


MODEL = "a2a/topology/model.py"
ONE_SHOT = "a2a/algorithms/one_shot.py"
DDP = "a2a/integrations/ddp.py"


@pytest.mark.parametrize(
    ("rule", "file", "text", "complaint"),
    [
        (order_of_layers, MODEL, "import a2a.comm", "topology/model.py:1: imports a2a.comm; comm comes after topology"),
        (order_of_layers, MODEL, "from .. import comm", "imports a2a.comm; comm comes after topology"),
        (order_of_layers, MODEL, "from ..comm import X", "imports a2a.comm (X); comm comes after topology"),
        (order_of_layers, "a2a/comm.py", "def f():\n    from a2a.ops import f", "comm.py:2: imports a2a.ops (f); ops"),
        (
            order_of_layers,
            "a2a/comm.py",
            "if X:\n    from .algorithms import one_shot",
            "a2a.algorithms.one_shot; algo",
        ),
        (order_of_layers, "a2a/comm.py", "from a2a.plan import choose", "imports a2a.plan (choose); plan comes after"),
        (order_of_layers, "a2a/plan.py", "import a2a", "only __main__, cli, integrations import the package itself"),
        (order_of_layers, "a2a/plan.py", "from a2a import f", "imports a2a (f)"),
        (order_of_layers, "a2a/ops.py", "import a2a.cli.bench", "nothing imports cli"),
        (order_of_layers, "a2a/cli/bench.py", "import a2a.integrations.c10d_backend", "nothing imports integrations"),
        (order_of_layers, "a2a/__init__.py", "import a2a.integrations.ddp", "nothing imports integrations"),
        (order_of_layers, "a2a/__init__.py", "from a2a.cli import main", "nothing imports cli"),
        (order_of_layers, "a2a/helpers.py", "", "a2a/helpers.py: belongs to no layer"),
        (order_of_layers, "a2a/ops.py", "import a2a.helpers", "imports a2a.helpers, which belongs to no layer"),
        (algorithms_know_no_transport, ONE_SHOT, "from a2a.transport import cpu_shm", "imports a2a.transport.cpu_shm;"),
        (algorithms_know_no_transport, ONE_SHOT, "from ..transport import find", "imports a2a.transport;"),
        (integrations_use_public_names, DDP, "from a2a.comm import _store", "imports _store of a2a.comm"),
        (integrations_use_public_names, DDP, "import a2a.comm", "imports a2a.comm of a2a.comm"),
        (topology_works_without_torch, MODEL, "import torch", "model.py:1: imports torch"),
        (
            topology_works_without_torch,
            "a2a/config.py",
            "try:\n    from torch import nn\nfinally:\n    f()",
            "config.py:2",
        ),
        (topology_works_without_torch, MODEL, "class A:\n    import torch.distributed", "model.py:2"),
        (environment_is_read_in_config, "a2a/ops.py", "import os\nos.environ['X'] = '1'", "ops.py:2: uses os.environ"),
        (environment_is_read_in_config, "a2a/ops.py", "from os import path, getenv", "uses os.getenv"),
        (environment_is_read_in_config, "csrc/cpu/signal.h", 'auto x = std::getenv("X");', "signal.h: calls getenv"),
        (
            few_variables,
            "a2a/ops.py",
            "X = f'see A2A_TIMEOUT {1}'",
            "names A2A_TIMEOUT, which a2a/config.py doesn't know",
        ),
        (few_variables, "a2a/config.py", str([f"A2A_V{n}" for n in range(9)]), "9 variables, at most 8"),
        (few_public_names, "a2a/__init__.py", f"__all__ = {[f'f{n}' for n in range(31)]}", "31 names"),
        (few_public_names, "a2a/__init__.py", "__all__: list[str] = ['f', 'f']", "twice"),
        (few_public_names, "a2a/__init__.py", "f = 1", "0 names"),
        (assembly_lives_in_ptx, "csrc/cpu/signal.h", 'asm volatile("pause" ::: "memory");', "outside ptx.cuh"),
        (assembly_lives_in_ptx, "csrc/cpu/compat.h", '__asm__("nop");', "outside ptx.cuh"),
        (
            assembly_lives_in_ptx,
            "csrc/cuda/ptx.cuh",
            'asm volatile("a" ::: "memory");\nasm("b");',
            'clobber: asm("b");',
        ),
    ],
)
def test_a_broken_rule_is_found(
    rule: Callable[[Path], Complaints], file: str, text: str, complaint: str, tmp_path: Path
) -> None:
    found = rule(plant(tmp_path, {file: text}))
    assert any(complaint in line for line in found), found


def test_a_stray_name_is_found() -> None:
    assert no_stray_names([".ci/run", "a2a/ops.py", "README.md"]) == []
    assert no_stray_names(["a2a/ops.py", "setup.py", "docs/index.md"]) == [
        "docs: not a top-level name of this repository",
        "setup.py: not a top-level name of this repository",
    ]
