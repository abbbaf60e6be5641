"""Plans on disk: found again, told apart, made again when damaged, never in the way."""

import json

import pytest

from rl3d.layout import Mesh, ShardLayout
from rl3d.reshard import cache
from tests.reshard.models import llama

SPECS = llama(2, 8, 8, 7, 8, padded_vocab=8)


@pytest.fixture
def built(monkeypatch):
    """Number of plans that were really made."""
    made = []
    original = cache.build_plan

    def count(*args, **options):
        made.append(1)
        return original(*args, **options)

    monkeypatch.setattr(cache, "build_plan", count)
    return made


def _plan(directory=None, specs=SPECS, mesh=None, gen=4, **options):
    mesh = mesh or Mesh(2, 2, 1)
    src, dst = ShardLayout.training(mesh, 2, zero=options.pop("zero", 1)), ShardLayout.replicas(gen, [range(gen)], 2)
    return cache.cached_plan(specs, src, dst, directory=directory, **options)


def test_the_second_plan_is_read_and_equal(tmp_path, built):
    first, second = _plan(tmp_path), _plan(tmp_path)
    assert len(built) == 1 and first.hash == second.hash and first.certificate == second.certificate
    assert (first.rows.src_offset == second.rows.src_offset).all()
    (report,) = tmp_path.glob("*.json")
    assert json.loads(report.read_text())["hash"] == first.hash
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".npz"], "nothing half-written stays"


def test_other_inputs_are_other_plans(tmp_path, built):
    base = _plan(tmp_path)
    others = [
        _plan(tmp_path, mesh=Mesh(2, 2, 1, ("pp", "tp", "dp"))),
        _plan(tmp_path, mesh=Mesh(2, 1, 2)),
        _plan(tmp_path, mesh=Mesh(2, 1, 2), zero=3),
        _plan(tmp_path, gen=2),
        _plan(tmp_path, staging_bytes=4096),
        _plan(tmp_path, nodes=[0, 0, 1, 1]),
        _plan(tmp_path, specs=llama(2, 8, 8, 7, 8, padded_vocab=8, dtype="float32")),
    ]
    assert len(built) == 8 and len({base.hash, *(p.hash for p in others)}) == 8


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "old"])
def test_a_damaged_file_is_made_again(tmp_path, built, damage):
    good = _plan(tmp_path)
    (file,) = tmp_path.glob("*.npz")
    data = bytearray(file.read_bytes())
    if damage == "changed":
        data[len(data) // 2] ^= 1
    file.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "changed": data, "old": b"PK\x03\x04 not a plan"}[damage])
    assert _plan(tmp_path).hash == good.hash and len(built) == 2
    assert _plan(tmp_path).hash == good.hash and len(built) == 2, "the damaged file was replaced"


def test_the_environment_decides(tmp_path, built, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    _plan()
    assert len(list((tmp_path / "home" / "rl3d" / "plans").glob("*.npz"))) == 1
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "mine"))
    _plan()
    assert len(list((tmp_path / "mine").glob("*.npz"))) == 1
    monkeypatch.setenv(cache.VARIABLE, "off")
    _plan()
    _plan()
    assert len(built) == 4 and cache.cache_directory() is None


def test_a_place_that_cannot_be_written_is_no_error(tmp_path, built):
    (tmp_path / "file").write_text("in the way")
    assert _plan(tmp_path / "file" / "plans").certificate.ratio == 1.0 and len(built) == 1
