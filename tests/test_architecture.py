"""Imports point downward: the house of rl3d, floor by floor."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "rl3d"
# a room may import rooms on floors below its own, and itself; `config` reads layouts and is read by everything above
FLOORS = [
    {"layout", "kernels"},
    {"config", "reshard", "distributed", "utils"},
    {"models"},
    {"estimate"},
    {"io"},
    {"algorithms", "data", "generation"},
    {"rewards"},
    {"engine"},
    {"trainer"},
    {"bench"},
    {"cli"},
    {"__main__", "__init__"},
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
# lazily imported by name only, for `rl3d.Actor` and friends
LAZY = {"__init__"}


def _room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "rl3d" and len(parts) > 1 else None


def _imports(path: Path):
    package = ["rl3d", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            if module == "rl3d":
                yield from (f"rl3d.{alias.name}" for alias in node.names)


def test_imports_point_downward():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        assert room in FLOOR, f"{path}: room {room} has no floor; give it one in this test and in the design"
        if room in LAZY:
            continue
        for module in _imports(path):
            other = _room(module)
            if other in FLOOR and other != room and FLOOR[other] >= FLOOR[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_layout_is_pure_arithmetic():
    for path in (ROOT / "layout").rglob("*.py"):
        for module in _imports(path):
            assert module.split(".")[0] not in {"torch", "megatron", "deepspeed", "transformers"}, (path, module)
