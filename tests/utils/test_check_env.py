"""What check-env makes of versions and builds; the report itself is tested with the command."""

from importlib import import_module
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

report = import_module("rl3d.utils.check_env")  # the package gives the name to the function


@pytest.mark.parametrize(
    ("distribution", "version", "words"),
    [
        ("torch", "2.14.1+cu130", ""),
        ("torch", "2.12.0a0+x.nv26", ""),
        ("torch", "2.10.0", "container"),
        ("torch", "2.15.0", "container"),
        ("deepspeed", "0.18.2", "pip install 'deepspeed<0.20,>=0.19.8'"),
        ("megatron-core", "0.20.0", "pip install 'megatron-core<0.20,>=0.19.2'"),
        ("transformers", "4.57.0", "pip install 'transformers<6,>=5.2'"),
        ("transformers", "5.24.0", ""),
    ],
)
def test_versions_out_of_range_are_named_with_the_remedy(distribution, version, words):
    wrong = report._out_of_range(distribution, version)
    assert bool(wrong) == bool(words) and words in wrong
    if words:
        (asked,) = [r for text in requires("rl3d") if (r := Requirement(text)).name == distribution]
        assert f"rl3d needs {asked.specifier}" in wrong
        facts = {"ok": True, "version": version}
        if distribution == "torch":
            part = report._torch({"torch": facts})
            assert not part["ok"] and part["required"] and part["version"] == version


KERNELS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # torch 2.14.1+cu130


@pytest.mark.parametrize(
    ("kernels", "capability", "expected"),
    [
        (KERNELS, (7, 5), True),
        (KERNELS, (8, 9), True),  # an L4 runs code for 8.6
        (KERNELS, (10, 3), True),
        (KERNELS, (7, 0), False),  # a V100
        (KERNELS, (11, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_80", "compute_80"], (12, 0), True),
        (["compute_90"], (8, 0), False),
    ],
)
def test_kernels_for_a_gpu(kernels, capability, expected):
    assert report._has_kernels(kernels, *capability) == expected
    facts = {"ok": True, "cuda": "13.0", "gpus": ["A card"], "kernels": kernels, "needs": [list(capability)]}
    part = report._cuda({"torch": facts})
    assert part["ok"] == expected and part["detail"].startswith("1 device (A card)")
    assert (f"not for sm_{capability[0]}{capability[1]}: install" in part["detail"]) == (not expected)


@pytest.mark.parametrize(("cuda", "words"), [(None, "a CPU build; install one with CUDA"), ("13.0", "Update the driver")])
def test_a_gpu_that_torch_does_not_see(cuda, words, monkeypatch):
    monkeypatch.setattr(report, "_gpu_present", lambda: True)
    part = report._cuda({"torch": {"ok": True, "cuda": cuda, "gpus": []}})
    assert not part["ok"] and words in part["detail"]
