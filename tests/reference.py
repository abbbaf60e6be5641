"""What tests compare with: tiny Hugging Face models, and a single-process trainer in plain torch."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# 8 query heads over 4 KV heads of 16: head_dim x heads != hidden; 253 is prime, so every layout pads the vocabulary
TINY = {
    "vocab_size": 253, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def hf_llama(tied: bool = False, seed: int = 0, **changes: object):
    """A random llama whose logits are far from uniform and whose norms are not all ones."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{**TINY, "tie_word_embeddings": tied, **changes},
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3.0)
    return model


def hf_greedy(model, prompt: list[int], count: int) -> list[int]:
    """The ``count`` tokens that transformers finds most probable after ``prompt``; nothing ends them early."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None,
                         pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist()


def pair_tokenizer(size: int = TINY["vocab_size"]):
    """A tokenizer of single letters and of pairs of them, so that texts lie across tokens; its first token is padding."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnop"
    tokens = [*letters, *(a + b for a in letters for b in letters)][: size - 1]
    vocabulary = {token: index for index, token in enumerate(["_", *tokens])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(token) for token in tokens if len(token) > 1]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="_", clean_up_tokenization_spaces=False)


def save_llama(directory: Path, tied: bool = False, seed: int = 0, **changes: object) -> Path:
    """The same model as a Hugging Face directory."""
    hf_llama(tied, seed, **changes).save_pretrained(directory)
    return directory


@dataclass
class Sequence:
    """Tokens, length of the prompt, and the weight of each response token in the loss (0 outside the mask)."""

    tokens: Tensor
    prompt: int
    weight: Tensor


def sequences(step: int, count: int = 8) -> list[Sequence]:
    """Ragged sequences with unequal response masks; the same everywhere."""
    generator = torch.Generator().manual_seed(1000 + step)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    out = []
    for _ in range(count):
        prompt, response = draw(2, 6), draw(1, 14)
        tokens = torch.randint(0, TINY["vocab_size"], (prompt + response,), generator=generator)
        mask = torch.rand(response, generator=generator) < 0.8
        out.append(Sequence(tokens, prompt, torch.randn(response, generator=generator) * mask))
    return out


def response_logprobs(model, tokens: Tensor, prompt: int, temperature: float = 1.0) -> Tensor:
    """Log-probability of each response token by a full forward pass, [len - prompt]."""
    logits = model(tokens[None]).logits[0].float() / temperature
    return torch.log_softmax(logits, -1)[prompt - 1 : -1].gather(1, tokens[prompt:, None])[:, 0]


def train_reference(
    tied: bool, steps: int = 3, temperature: float = 0.7, model=None, dtype: torch.dtype = torch.float32, **changes: object
) -> tuple[dict, list[float]]:
    """Single process, Hugging Face + torch AdamW: loss = -sum(weight * logprob) / tokens of the global batch.

    ``model`` is trained in place; by default the tiny llama. In bfloat16 with fp32 master weights, and gradients that
    are accumulated in fp32. Returns the final state dict and the gradient norm of each step before clipping to 0.5.
    """
    model = (hf_llama(tied, **changes) if model is None else model).to(dtype)
    model.train()
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.01)
    norms = []
    for step in range(steps):
        batch = sequences(step)
        total = sum(int((s.weight != 0).sum()) for s in batch)
        for master in masters:
            master.grad = torch.zeros_like(master)
        for s in batch:
            (-(response_logprobs(model, s.tokens, s.prompt, temperature) * s.weight).sum() / total).backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad += p.grad
                p.grad = None
        norms.append(torch.nn.utils.clip_grad_norm_(masters, 0.5).item())
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
    return {k: v.detach().float().clone() for k, v in model.state_dict().items()}, norms
