"""Memory of the generation weights: views that keep their place, and training weights used as they lie."""

import itertools

import pytest
import torch

from rl3d.engine.arena import ALIGN, Arena, alias_offset, alias_weights, house
from rl3d.layout import GenMesh, Mesh, ShardLayout
from tests.reshard import oracle
from tests.reshard.models import llama

LAYERS = 2
SPECS = llama(LAYERS, 16, 24, 19, 24, padded_vocab=24, tied=False, dtype="float32")


def test_views_keep_their_place_through_release_and_reservation():
    arena = Arena(torch.device("cpu"))
    like = {"a": torch.empty(3, 5), "b": torch.empty(7, dtype=torch.bfloat16), "c": torch.empty(2, 2, 2)}
    views = arena.place(like)
    assert {n: (v.shape, v.dtype) for n, v in views.items()} == {n: (t.shape, t.dtype) for n, t in like.items()}
    assert all(v.is_contiguous() and v.data_ptr() % ALIGN == views["a"].data_ptr() % ALIGN for v in views.values())
    assert len({v.untyped_storage()._cdata for v in views.values()}) == 1
    epoch, size = arena.epoch, arena.nbytes
    assert size == 3 * ALIGN and arena.reserve() == 0 and arena.epoch == epoch
    assert arena.release() == size and arena.nbytes == 0 and arena.release() == 0
    assert arena.reserve() == size and arena.epoch == epoch + 2, "an address that may differ is another epoch"
    views["a"].fill_(1), views["b"].fill_(2), views["c"].fill_(3)
    assert [float(v.float().mean()) for v in views.values()] == [1, 2, 3]
    again = arena.place({"x": torch.empty(1)})
    assert arena.nbytes == size and again["x"].data_ptr() == views["a"].data_ptr(), "layouts share the memory"


def test_what_peers_have_mapped_is_never_given_back():
    arena = Arena(torch.device("cpu"))
    view = arena.place({"a": torch.empty(8)})["a"]
    view.fill_(3)
    arena.exported = True
    assert arena.release() == 0 and arena.epoch == 1
    larger = arena.place({"b": torch.empty(1000)})["b"]
    assert view.tolist() == [3] * 8 and larger.data_ptr() != view.data_ptr(), "the old memory lives as long as its views"


def _meshes():
    for order in itertools.permutations(("tp", "pp", "dp")):
        for tp, pp, dp, gen in ((2, 1, 2, 2), (2, 2, 1, 4), (1, 2, 2, 1), (2, 1, 2, 4), (2, 1, 2, 1), (4, 1, 1, 2)):
            yield Mesh(tp, pp, dp, order), gen


@pytest.mark.parametrize(("mesh", "gen"), list(_meshes()), ids=str)
def test_an_alias_holds_the_very_values_of_the_generation_shard(mesh, gen):
    """Against shards cut by an oracle of the tests; every contiguous piece is found, and nothing else."""
    source = ShardLayout.training(mesh, LAYERS)
    target = ShardLayout.generation(GenMesh(gen, (0, 1, 2, 3)), LAYERS)
    arrays = oracle.whole(SPECS)
    places = {r: (c.pp, c.tp) for r in range(4) for c in [mesh.coords(r)]}
    train = oracle.shards(SPECS, arrays, places, mesh.tp, mesh.pp)
    wanted = oracle.shards(SPECS, arrays, {r: (0, r % gen) for r in range(4)}, gen, 1)
    found = 0
    for rank in range(4):
        weights = oracle.to_torch(SPECS, train[rank])
        views = alias_weights(SPECS, source, target, rank, weights)
        expected = oracle.to_torch(SPECS, wanted[rank])
        for spec in SPECS:
            if spec.name not in weights:
                assert spec.name not in views
                continue
            whole, piece = weights[spec.name].flatten(), expected[spec.name].flatten()
            n = len(piece)
            starts = [i for i in range(len(whole) - n + 1) if n <= len(whole) and torch.equal(whole[i : i + n], piece)]
            if spec.name in views:
                view = views[spec.name]
                assert torch.equal(view, expected[spec.name]), spec.name
                assert view.untyped_storage().data_ptr() == weights[spec.name].untyped_storage().data_ptr()
                found += 1
            else:
                assert not starts, f"{spec.name} of rank {rank} lies at {starts} and was not found"
    assert found, "norms at least lie where they are"


def test_gate_and_up_are_one_piece_only_where_both_layouts_cut_alike():
    gate_up = next(s for s in SPECS if s.name.endswith("0.mlp.linear_fc1.weight"))
    qkv = next(s for s in SPECS if s.name.endswith("0.self_attention.linear_qkv.weight"))
    one, two = (ShardLayout.training(Mesh(tp, 1, 4 // tp), LAYERS) for tp in (1, 2))
    gen = ShardLayout.generation(GenMesh(2, (0, 1, 2, 3)), LAYERS)
    assert [alias_offset(gate_up, two, gen, rank) for rank in range(4)] == [0, 0, 0, 0]
    assert [alias_offset(gate_up, one, gen, rank) for rank in range(4)] == [None] * 4
    half = qkv.numel // 2
    assert [alias_offset(qkv, one, gen, rank) for rank in range(4)] == [0, half, 0, half]
    sharded = ShardLayout.training(Mesh(2, 1, 2), LAYERS, zero=3)
    assert alias_offset(qkv, sharded, gen, 0) is None, "flat parts are no tensors"


def test_a_model_moves_into_the_arena_without_being_there_twice():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    parameters = dict(model.named_parameters())
    borrowed = torch.arange(64.0).view(8, 8)
    before = {name: p.untyped_storage() for name, p in parameters.items()}
    arena = Arena(torch.device("cpu"))
    weights = house(parameters, arena, {"0.weight": borrowed})
    assert weights["0.weight"].data_ptr() == parameters["0.weight"].data_ptr() == borrowed.data_ptr()
    assert arena.nbytes == 3 * ALIGN, "what is borrowed takes no memory"
    assert all(p.data_ptr() != before[n].data_ptr() for n, p in parameters.items())
    weights["1.bias"].fill_(4)
    assert torch.equal(model[1].bias.detach(), torch.full((2,), 4.0))
