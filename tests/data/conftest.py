import pytest

from rl3d.data.tiny import make_tiny_model
from rl3d.data.tokenizers import load_tokenizer

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A directory with a random llama and a SentencePiece tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", CONFIG, seed=1)


@pytest.fixture
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model)
