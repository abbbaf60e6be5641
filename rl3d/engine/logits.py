"""Two checkpoints compared by what they compute: Hugging Face files by transformers, Megatron files by megatron-core.

Equal fingerprints say that the rules are applied alike in both directions; equal log-probabilities of the next token say
that they are right, because each side is computed by code that knows nothing of the other.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl3d.io.hf_reader import CheckpointError
from rl3d.io.source import Source


class LogitsGap(NamedTuple):
    """How far apart two models are on one sequence.

    Attributes:
        tokens: of the sequence.
        worst: largest difference between log-probabilities of the next token, over positions and vocabulary.
        position: where that is.
        greedy: positions at which the likeliest tokens differ.
    """

    tokens: int
    worst: float
    position: int
    greedy: int


def read_texts(text: str) -> list[str]:
    """Lines of a file that are not empty, or the text itself where there is no such file."""
    try:
        lines = Path(text).read_text(encoding="utf-8").splitlines() if Path(text).is_file() else [text]
    except OSError:  # longer than a file name can be
        lines = [text]
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise CheckpointError(f"--logits {text!r}: no text; expected a text, or a file with one in each line")
    return lines


def logits_gaps(a: Source, b: Source, texts: Sequence[str]) -> list[LogitsGap]:
    """Compare next-token log-probabilities in fp32, a text at a time. Each model is in memory whole, one after the other.

    Tokens are those of the tokenizer beside ``a``, or else ``b``.

    Raises:
        CheckpointError: no tokenizer, or vocabularies of different sizes.
        UnsupportedModelError: megatron-core's modules here do not compute the model.
    """
    if a.arch.vocab_size != b.arch.vocab_size:
        raise CheckpointError(
            f"{a.path} has a vocabulary of {a.arch.vocab_size} tokens, {b.path} of {b.arch.vocab_size}: no logits to compare"
        )
    sequences = [torch.tensor(ids) for ids in _tokenize(a, b, texts)]
    first = [torch.log_softmax(x, -1) for x in _logits(a, sequences)]
    return [_gap(x, torch.log_softmax(y, -1)) for x, y in zip(first, _logits(b, sequences), strict=True)]


def _gap(a_TV: Tensor, b_TV: Tensor) -> LogitsGap:
    apart_T = (a_TV - b_TV).abs().amax(-1)
    position = int(apart_T.argmax())
    greedy = int((a_TV.argmax(-1) != b_TV.argmax(-1)).sum())
    return LogitsGap(len(a_TV), float(apart_T[position]), position, greedy)


def _tokenize(a: Source, b: Source, texts: Sequence[str]) -> list[list[int]]:
    from rl3d.data.tokenizers import load_tokenizer

    errors = []
    for source in (a, b):
        try:
            tokenizer = load_tokenizer(source.sidecars)
        except FileNotFoundError as error:
            errors.append(str(error))
            continue
        return [tokenizer(text)["input_ids"] for text in texts]
    raise CheckpointError("; ".join(errors))


def _logits(source: Source, sequences: Sequence[Tensor]) -> Iterable[Tensor]:
    return (_megatron if source.kind == "torch_dist" else _transformers)(source, sequences)


@torch.no_grad()
def _transformers(source: Source, sequences: Sequence[Tensor]) -> list[Tensor]:
    import transformers
    from transformers import GgufConfig

    from rl3d.utils.quiet import quiet_transformers

    if source.kind == "gguf":
        place: dict[str, Any] = {"gguf_file": source.weights.name, "quantization_config": GgufConfig(dequantize=True)}
    else:
        place = {}
    with quiet_transformers():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(source.weights if not place else source.weights.parent), dtype=torch.float32, local_files_only=True, **place
        )
    return [model.eval()(tokens[None]).logits[0].float() for tokens in sequences]


@torch.no_grad()
def _megatron(source: Source, sequences: Sequence[Tensor]) -> list[Tensor]:
    from rl3d.distributed import bootstrap
    from rl3d.distributed.groups import GroupRegistry, training_groups
    from rl3d.layout import Mesh
    from rl3d.models.build import RowBoundaries, build_model, canonical_parameters

    running = bootstrap.current()
    runtime = running or bootstrap.init(device="cpu")
    try:
        device, arch = torch.device("cpu"), source.arch
        groups = training_groups(Mesh(1, 1, 1), GroupRegistry.of(runtime, "logits"))
        model = build_model(arch, groups, padded_vocab=arch.vocab_size, dtype=torch.float32, device=device)
        parameters = canonical_parameters(model, arch, groups)
        for mapped in source.parameters:
            parameters.pop(mapped.spec.name).copy_(source.read(mapped))
        if parameters:
            raise CheckpointError(f"{source.path}: the model has parameters that no rule maps: {sorted(parameters)}")
        out = []
        for tokens in sequences:
            row = RowBoundaries.of((len(tokens),), device)
            positions = torch.arange(len(tokens))
            out.append(model.eval()(tokens[None], positions[None], None, packed_seq_params=row)[0].float())
        return out
    finally:
        if running is None:
            runtime.shutdown()
