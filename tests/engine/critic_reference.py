"""A critic in one process: Hugging Face backbone, torch's Linear head and AdamW, GAE as a loop over each response."""

from typing import Any

import torch

from rl3d.engine.policy import TrainSample


def values_of(model: Any, sample: TrainSample) -> torch.Tensor:
    """Value of the state in which each response token was chosen, [len(response)]."""
    tokens = torch.tensor([sample.prompt_ids + sample.response_ids])
    hidden = model.model(tokens).last_hidden_state[0]
    return model.score(hidden)[len(sample.prompt_ids) - 1 : -1, 0].float()


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition (arXiv:1506.02438, eq. 16): sum over later steps of (gamma lam)^l delta, written out."""
    after = [*values[1:], 0.0]
    delta = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]


def train(model: Any, samples: list[TrainSample], settings: dict[str, Any], rates: list[float]) -> dict[str, Any]:
    """Values, GAE, whitening, and one optimiser step for each rate on alternating halves of the samples.

    Returns old values, advantages (whitened) and returns of all valid tokens, each step's loss and gradient norm.
    """
    valid = [s for s in samples if s.valid]
    with torch.no_grad():
        old = {id(s): values_of(model, s) for s in valid}
    raw, returns = {}, {}
    for s in valid:
        rewards = [0.0] * (len(s.response_ids) - 1) + [s.score]
        found = torch.tensor(gae(rewards, old[id(s)].tolist(), settings["gamma"], settings["lam"]))
        raw[id(s)], returns[id(s)] = found, found + old[id(s)]
    every = torch.cat(list(raw.values()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=settings["betas"], eps=settings["eps"],
                                  weight_decay=settings["weight_decay"])  # fmt: skip
    halves = [samples[:4], samples[4:]]
    steps = []
    for index, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        batch = [s for s in halves[index % 2] if s.valid]
        tokens = sum(len(s.response_ids) for s in batch)
        loss = torch.zeros(())
        for s in batch:
            new, before, target = values_of(model, s), old[id(s)], returns[id(s)]
            clipped = before + (new - before).clamp(-settings["value_clip"], settings["value_clip"])
            loss = loss + 0.5 * torch.maximum((new - target) ** 2, (clipped - target) ** 2).sum() / tokens
        optimizer.zero_grad()
        (settings["vf_coef"] * loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        optimizer.step()
        steps.append({"loss": float(loss), "norm": float(norm)})
    return {
        "values": torch.cat([old[id(s)] for s in valid]), "returns": torch.cat([returns[id(s)] for s in valid]),
        "advantages": (every - every.mean()) / (every.var() + 1e-8).sqrt(), "steps": steps,
    }  # fmt: skip
