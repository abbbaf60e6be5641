"""Installing beside a torch that is there already, an NGC container's for example, leaves it alone: pip's own resolver."""

import json
import re
from importlib.metadata import PackageNotFoundError, requires, version

import pytest
from packaging.requirements import Requirement

from tests.install.environments import make_environment, pip, stand_in

NGC = "2.11.0a0+x.nv26"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    place = tmp_path_factory.mktemp("ngc")
    return make_environment(place / "venv", stand_in(place, "torch", NGC))


@pytest.mark.parametrize("extra", ["", "[quickstart]"])
def test_a_pinned_prerelease_of_torch_stays(python, wheel, tmp_path, extra):
    constraint = tmp_path / "constraint.txt"
    constraint.write_text(f"torch=={NGC}\n")
    report = tmp_path / "report.json"
    pip(
        python, "install", "-q", "--dry-run", "--report", str(report), "-c", str(constraint), f"rl3d{extra} @ file://{wheel}"
    )
    installed = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
    assert installed == ["rl3d"]


def test_a_torch_out_of_range_is_not_taken(wheel, tmp_path):
    other = make_environment(tmp_path / "venv", stand_in(tmp_path, "torch", "2.15.0"))
    done = pip(other, "install", "--dry-run", f"rl3d @ file://{wheel}", ok=False)
    assert done.returncode != 0 and "No matching distribution found for torch<2.15,>=2.11.0.dev0" in done.stderr, done.stderr


def test_no_dependency_asks_for_another_torch():
    """All that rl3d brings along, by the metadata of what is installed: each takes the container's torch."""
    seen, asks, waiting = set(), {}, ["rl3d"]
    while waiting:
        name = waiting.pop()
        if name in seen or name == "torch":
            continue
        seen.add(name)
        try:
            version(name)
        except PackageNotFoundError:
            continue
        for text in requires(name) or []:
            requirement = Requirement(text)
            wanted = {"extra": "quickstart"} if name == "rl3d" else {"extra": ""}
            if requirement.marker is not None and not requirement.marker.evaluate(wanted):
                continue
            depends = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if depends == "torch":
                asks[name] = requirement.specifier
            waiting.append(depends)
    assert {"rl3d", "deepspeed", "megatron-core"} <= set(asks) and {"transformers", "safetensors"} <= seen
    assert not {name for name in seen if name in {"torchvision", "torchaudio", "triton"} or name.startswith("nvidia-")}
    refused = {name: str(spec) for name, spec in asks.items() if name != "rl3d" and not spec.contains(NGC, prereleases=True)}
    assert refused == {}
